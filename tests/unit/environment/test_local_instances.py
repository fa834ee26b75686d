"""An environment in the client's process that hangs, ends the program, or fails at once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from tinsmith.environments.environment import Action, Environment, Observation, StepResult
from tinsmith.environments.local import EnvironmentEndedError, create_local_instance


class Unruly(Environment):
    """Does what the action says, and counts what was closed."""

    default_config: ClassVar[Mapping[str, Any]] = {"fails": False}
    gate: ClassVar = threading.Event()
    num_closed: ClassVar = 0

    def reset(self, seed: int, config: Mapping[str, Any]) -> Observation:
        if config["fails"]:
            raise RuntimeError("no reset")
        return Observation.of_user("go")

    def step(self, action: Action) -> StepResult:
        match action.text:
            case "hang":
                self.gate.wait()
            case "exit":
                sys.exit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "late":
                raise TimeoutError("its own")
            case "stop":
                raise StopIteration
        return StepResult(Observation(), 1.0, True)

    def close(self) -> None:
        Unruly.num_closed += 1


@pytest.fixture(autouse=True)
def _gate() -> Iterator[None]:
    Unruly.gate, Unruly.num_closed = threading.Event(), 0
    yield
    Unruly.gate.set()


async def test_those_that_hang_keep_no_place_of_others() -> None:
    hanging = [await create_local_instance(Unruly, step_timeout_s=0.2) for _ in range(50)]
    steps = [asyncio.ensure_future(each.step_async("hang")) for each in hanging]
    good = await create_local_instance(Unruly)
    assert (await good.step_async("go")).reward == 1.0
    await good.delete_async()
    for step in steps:
        with pytest.raises(EnvironmentEndedError, match=r"step took over 0\.2 s"):
            await step
    with pytest.raises(EnvironmentEndedError, match="close: an earlier call has not ended"):
        await hanging[0].delete_async()
    assert Unruly.num_closed == 1


@pytest.mark.parametrize("action", ["exit", "interrupt", "stop"])
async def test_one_that_ends_the_program_loses_its_episode_alone(action: str) -> None:
    instance = await create_local_instance(Unruly)
    with pytest.raises(EnvironmentEndedError, match=r"it raised \w+"):
        await instance.step_async(action)
    await instance.delete_async()
    assert Unruly.num_closed == 1


async def test_its_own_timeout_is_its_own() -> None:
    instance = await create_local_instance(Unruly)
    with pytest.raises(TimeoutError, match="its own"):
        await instance.step_async("late")
    assert (await instance.step_async("go")).reward == 1.0
    await instance.delete_async()


async def test_one_that_cannot_begin_is_closed() -> None:
    with pytest.raises(RuntimeError, match="no reset"):
        await create_local_instance(Unruly, config={"fails": True})
    assert Unruly.num_closed == 1


async def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    instance = await create_local_instance(Unruly)
    (thread,) = set(threading.enumerate()) - before
    await instance.delete_async()
    thread.join(timeout=60)
    assert not thread.is_alive()
