"""Requests for different base weights take turns: never mixed, never kept waiting for ever."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith_sampler.vllm.base_turns import BASE, BaseTurns


class Weights:
    """The weights of an engine, and what used them."""

    def __init__(self) -> None:
        self.loaded = BASE
        self.switches: list[int] = []
        self.problem: Exception | None = None
        self.turns = BaseTurns(self.load)

    async def load(self, key: int) -> None:
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        self.loaded = key
        self.switches.append(key)

    async def use(self, key: int, end: asyncio.Event) -> int:
        await self.turns.enter(key)
        begun_with = self.loaded
        await end.wait()
        assert self.loaded == begun_with
        self.turns.leave()
        return begun_with


async def test_requests_for_the_same_weights_run_together_without_a_switch() -> None:
    weights, end = Weights(), asyncio.Event()
    end.set()
    assert await asyncio.gather(*(weights.use(BASE, end) for _ in range(4))) == [BASE] * 4
    assert weights.switches == []


async def test_other_weights_wait_for_what_runs_and_later_requests_wait_behind_them() -> None:
    weights, first_end, others_end = Weights(), asyncio.Event(), asyncio.Event()
    others_end.set()
    first = asyncio.create_task(weights.use(BASE, first_end))
    await asyncio.sleep(0)
    others = [asyncio.create_task(weights.use(key, others_end)) for key in (7, 7, BASE, 8)]
    await asyncio.sleep(0)
    assert (weights.loaded, [task.done() for task in others]) == (BASE, [False] * 4)
    first_end.set()
    assert await asyncio.gather(first, *others) == [BASE, 7, 7, BASE, 8]
    assert weights.switches == [7, BASE, 8]


async def test_one_that_waits_no_longer_holds_up_nothing() -> None:
    weights, first_end, end = Weights(), asyncio.Event(), asyncio.Event()
    end.set()
    first = asyncio.create_task(weights.use(BASE, first_end))
    await asyncio.sleep(0)
    given_up = asyncio.create_task(weights.use(7, end))
    await asyncio.sleep(0)
    later = asyncio.create_task(weights.use(BASE, end))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    first_end.set()
    assert await asyncio.gather(first, later) == [BASE, BASE]
    assert weights.switches == []


async def test_a_switch_that_fails_is_told_to_all_that_wait_and_the_next_one_works() -> None:
    weights, end = Weights(), asyncio.Event()
    end.set()
    weights.problem = ValueError("no such weights")
    failed = await asyncio.gather(weights.use(7, end), weights.use(7, end), return_exceptions=True)
    assert [str(one) for one in failed] == ["no such weights"] * 2
    weights.problem = None
    assert await weights.use(8, end) == 8


async def test_after_a_restart_the_first_weights_are_there() -> None:
    weights, end = Weights(), asyncio.Event()
    end.set()
    assert await weights.use(7, end) == 7
    weights.loaded = BASE
    weights.turns.restarted()
    assert await weights.use(BASE, end) == BASE
    assert weights.switches == [7]
