"""Work of requests: a few of a project at a time; large texts one of a project and two of all."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest
from tests.support.wait import eventually

from tinsmith_gateway.project_threads import (
    MAX_LARGE_TEXTS,
    MAX_SMALL_TEXT,
    ProjectThreads,
)

LARGE = MAX_SMALL_TEXT + 1


class Works:
    """Works that end when they are told to, and the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._ends: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def make(self, name: str) -> Callable[[], str]:
        """Return a work."""

        def work() -> str:
            self.begun.append(name)
            assert self._ends[name].wait(60.0)
            return name

        return work

    def end(self, *names: str) -> None:
        """Let works end, also before they begin."""
        for name in names:
            self._ends[name].set()

    async def wait_begun(self, *names: str) -> None:
        """Wait until these have begun, and no others."""
        await eventually(lambda: sorted(self.begun) == sorted(names))


async def test_projects_take_turns_and_small_texts_wait_for_nobody() -> None:
    threads, works = ProjectThreads(), Works()
    names = ["a1", "a2", "a3", "b1", "c1"]
    tasks = [
        asyncio.create_task(threads.run_texts(name[0], LARGE, works.make(name))) for name in names
    ]
    assert MAX_LARGE_TEXTS == 2
    await works.wait_begun("a1", "b1")
    works.end("small")
    assert await threads.run_texts("a", MAX_SMALL_TEXT, works.make("small")) == "small"
    assert works.begun[-1] == "small"
    works.end("a1")
    await works.wait_begun("a1", "b1", "small", "c1")
    works.end("c1")
    await works.wait_begun("a1", "b1", "small", "c1", "a2")
    works.end(*names)
    assert await asyncio.gather(*tasks) == names
    assert works.begun[-2:] == ["a2", "a3"], "a project's own come in their order"


async def test_a_turn_lasts_as_long_as_its_work_though_nobody_waits_for_it() -> None:
    threads, works = ProjectThreads(), Works()
    given_up = asyncio.create_task(threads.run_texts("a", LARGE, works.make("first")))
    await works.wait_begun("first")
    given_up.cancel()
    following = asyncio.create_task(threads.run_texts("a", LARGE, works.make("second")))
    others = asyncio.create_task(threads.run_texts("b", LARGE, works.make("other")))
    await works.wait_begun("first", "other")
    assert not given_up.done()
    works.end("first", "second", "other")
    assert await asyncio.gather(following, others) == ["second", "other"]
    with pytest.raises(asyncio.CancelledError):
        await given_up


async def test_one_that_gives_up_before_its_turn_takes_none() -> None:
    threads, works = ProjectThreads(), Works()
    running = asyncio.create_task(threads.run_texts("a", LARGE, works.make("first")))
    await works.wait_begun("first")
    waiting = asyncio.create_task(threads.run_texts("a", LARGE, works.make("never")))
    await asyncio.sleep(0)
    waiting.cancel()
    works.end("first", "last")
    assert await running == "first"
    assert await threads.run_texts("a", LARGE, works.make("last")) == "last"
    assert waiting.cancelled()
    assert works.begun == ["first", "last"]


@pytest.mark.parametrize(("num_cores", "expected"), [(1, 2), (2, 2), (8, 4), (256, 8)])
async def test_a_project_has_a_part_of_the_threads_on_any_machine(
    num_cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    threads, works = ProjectThreads(), Works()
    names = [f"a{number}" for number in range(200)]
    tasks = [asyncio.create_task(threads.run("a", works.make(name))) for name in names]
    await works.wait_begun(*names[:expected])
    works.end("b")
    assert await threads.run("b", works.make("b")) == "b"
    works.end(*names)
    assert await asyncio.gather(*tasks) == names


async def test_an_error_of_the_work_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        await ProjectThreads().run("a", divmod, 1, 0)
