from __future__ import annotations

import asyncio

import pytest

from tinsmith_trainer.runs.shared_gate import Gate


async def turns(num: int = 5) -> None:
    """Let other tasks come to where they wait."""
    for _ in range(num):
        await asyncio.sleep(0)


async def test_many_pass_and_a_closed_gate_waits_for_them_and_holds_the_next() -> None:
    gate = Gate()
    done: list[str] = []
    may_end = asyncio.Event()
    may_open = asyncio.Event()

    async def passing(name: str) -> None:
        async with gate.passing():
            await may_end.wait()
            done.append(name)

    async def closing(name: str) -> None:
        async with gate.closed():
            done.append(name)
            await may_open.wait()

    tasks = [asyncio.create_task(passing(name)) for name in ("a", "b")]
    await turns()
    tasks += [asyncio.create_task(closing(name)) for name in ("closed", "closed again")]
    await turns()
    tasks.append(asyncio.create_task(passing("c")))
    await turns()
    assert done == []
    may_end.set()
    await turns()
    assert done == ["a", "b", "closed"]
    may_open.set()
    await asyncio.gather(*tasks)
    assert sorted(done[3:]) == ["c", "closed again"]


async def test_a_failure_or_a_cancel_leaves_the_gate_as_it_was() -> None:
    gate = Gate()
    with pytest.raises(ValueError, match="inside"):
        async with gate.passing():
            raise ValueError("inside")
    with pytest.raises(ValueError, match="inside"):
        async with gate.closed():
            raise ValueError("inside")
    async with gate.passing():
        waiting = asyncio.create_task(gate.closed().__aenter__())
        await turns()
        waiting.cancel()
        await turns()
        async with gate.passing():
            pass
