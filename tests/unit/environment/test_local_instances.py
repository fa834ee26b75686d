"""An environment in the client's process that hangs, ends the program, or fails at once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
from tests.support.wait import eventually

from tinsmith.environments.environment import (
    Action,
    Environment,
    InvalidSettingError,
    Observation,
    StepResult,
)
from tinsmith.environments.local import (
    EnvironmentEndedError,
    LocalInstance,
    create_local_instance,
)


class PanicError(BaseException):
    """What a library in another language raises: no `Exception`."""


class Unruly(Environment):
    """Does what the action says, and counts what was closed."""

    default_config: ClassVar[Mapping[str, Any]] = {"begins": ""}
    gate: ClassVar = threading.Event()
    closed: ClassVar[list[Environment]] = []

    def __init__(self) -> None:
        # Of this test: one of an earlier test may close later.
        self._closed = Unruly.closed

    def reset(self, seed: int, config: Mapping[str, Any]) -> Observation:
        self._do(config["begins"])
        return Observation.of_user("go")

    def step(self, action: Action) -> StepResult:
        self._do(action.text)
        return StepResult(Observation(), 1.0, True)

    def close(self) -> None:
        self._closed.append(self)

    def _do(self, what: str) -> None:
        match what:
            case "hang":
                self.gate.wait()
            case "exit":
                sys.exit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "cancel":
                raise asyncio.CancelledError
            case "panic":
                raise PanicError("index out of bounds")
            case "late":
                raise TimeoutError("its own")
            case "stop":
                raise StopIteration
            case "fail":
                raise RuntimeError("no reset")


ENDS = ["exit", "interrupt", "cancel", "panic", "stop"]


@pytest.fixture(autouse=True)
def _gate() -> Iterator[None]:
    Unruly.gate, Unruly.closed = threading.Event(), []
    yield
    Unruly.gate.set()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "environment"}


async def test_those_that_hang_keep_no_place_of_others_and_are_closed_once_they_end() -> None:
    hanging = [asyncio.ensure_future(hang()) for _ in range(50)]
    good = await create_local_instance(Unruly)
    assert (await good.step_async("go")).reward == 1.0
    await good.delete_async()
    for instance in await asyncio.gather(*hanging):
        with pytest.raises(EnvironmentEndedError, match="step: step has not ended"):
            await instance.step_async("go")
        await instance.delete_async()
    await eventually(lambda: len(Unruly.closed) == 1)
    Unruly.gate.set()
    await eventually(lambda: len(Unruly.closed) == 51)


async def hang() -> LocalInstance:
    """Return an instance that hangs in its first step; it had the time that it needs to begin."""
    while True:
        try:
            instance = await create_local_instance(Unruly, step_timeout_s=0.5)
            break
        except EnvironmentEndedError:
            pass  # The machine is busy.
    with pytest.raises(EnvironmentEndedError, match=r"step took over 0\.5 s"):
        await instance.step_async("hang")
    return instance


@pytest.mark.parametrize("action", ENDS)
async def test_one_that_ends_the_program_loses_its_episode_alone(action: str) -> None:
    instance = await create_local_instance(Unruly)
    with pytest.raises(EnvironmentEndedError, match=r"it raised \w+"):
        await instance.step_async(action)
    await instance.delete_async()
    await eventually(lambda: len(Unruly.closed) == 1)


@pytest.mark.parametrize("begins", ENDS)
async def test_one_that_ends_the_program_at_its_beginning_is_closed(begins: str) -> None:
    with pytest.raises(EnvironmentEndedError, match=r"it raised \w+"):
        await create_local_instance(Unruly, config={"begins": begins})
    await eventually(lambda: len(Unruly.closed) == 1)


@pytest.mark.parametrize("made", [lambda: sys.exit(3), lambda: Unruly.gate.wait()])
async def test_what_cannot_be_made_loses_its_episode_alone(made: Any) -> None:
    with pytest.raises(EnvironmentEndedError, match=r"it raised SystemExit|its making took over"):
        await create_local_instance(made, step_timeout_s=0.2)


async def test_its_own_timeout_is_its_own() -> None:
    instance = await create_local_instance(Unruly)
    with pytest.raises(TimeoutError, match="its own"):
        await instance.step_async("late")
    assert (await instance.step_async("go")).reward == 1.0
    await instance.delete_async()


async def test_one_that_cannot_begin_is_closed() -> None:
    with pytest.raises(RuntimeError, match="no reset"):
        await create_local_instance(Unruly, config={"begins": "fail"})
    with pytest.raises(InvalidSettingError):
        await create_local_instance(Unruly, config={"ends": "well"})
    await eventually(lambda: len(Unruly.closed) == 2)


async def test_a_cancelled_beginning_is_not_waited_for() -> None:
    beginning = asyncio.ensure_future(create_local_instance(Unruly, config={"begins": "hang"}))
    await eventually(lambda: bool(threads()))
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    Unruly.gate.set()
    await eventually(lambda: len(Unruly.closed) == 1)


async def test_its_thread_ends_with_it() -> None:
    before = threads()
    instance = await create_local_instance(Unruly)
    (thread,) = threads() - before
    await instance.delete_async()
    thread.join(timeout=60)
    assert not thread.is_alive()
