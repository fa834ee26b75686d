"""Places for work at once, by project."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tinsmith_runtime.fairness.fair_slots import FairSlots

SECONDS = 30


class Crowd:
    """Work that holds a place until it is let go."""

    def __init__(self, slots: FairSlots) -> None:
        self.slots = slots
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, project: str, name: str) -> None:
        """Begin to wait, in the order of the calls."""
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(project, name))
        await settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await asyncio.wait_for(self.tasks[name], SECONDS)
        await settle()

    async def _hold(self, project: str, name: str) -> None:
        async with self.slots.hold(project):
            self.begun.append(name)
            await self.ends[name].wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_project_that_waits_in_hundreds_leaves_a_place_to_another() -> None:
    crowd = Crowd(FairSlots(4, 2))
    for number in range(100):
        await crowd.add("loud", f"loud-{number}")
    assert crowd.begun == ["loud-0", "loud-1"]
    await crowd.add("quiet", "quiet-0")
    assert crowd.begun[-1] == "quiet-0"
    await crowd.end("loud-0")
    assert crowd.begun[-1] == "loud-2"
    for task in crowd.tasks.values():
        task.cancel()


async def test_the_last_place_is_for_a_project_that_has_none() -> None:
    crowd = Crowd(FairSlots(3, 3))
    for number in range(5):
        await crowd.add("loud", f"loud-{number}")
    assert crowd.begun == ["loud-0", "loud-1"]
    await crowd.add("quiet", "quiet-0")
    assert crowd.begun[-1] == "quiet-0"
    # Another project comes before a third one of the loud project.
    await crowd.add("third", "third-0")
    await crowd.end("loud-0")
    assert crowd.begun[-1] == "third-0"
    for task in crowd.tasks.values():
        task.cancel()


async def test_one_that_gives_up_leaves_its_place() -> None:
    crowd = Crowd(FairSlots(2, 1))
    for name in ("first", "second", "third"):
        await crowd.add("p", name)
    crowd.tasks["second"].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await crowd.tasks["second"]
    await crowd.end("first")
    assert crowd.begun == ["first", "third"]
    await crowd.end("third")
    # Given up just when the place was given.
    await crowd.add("p", "fourth")
    await crowd.add("p", "fifth")
    crowd.ends["fourth"].set()
    crowd.tasks["fifth"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await crowd.tasks["fifth"]
    await asyncio.wait_for(crowd.tasks["fourth"], SECONDS)
    await crowd.add("p", "sixth")
    assert crowd.begun[-1] == "sixth"
    await crowd.end("sixth")
