"""Threads for what requests cost: a project has a few at a time, so that others' are not behind it.

Bodies are parsed, texts become tokens, and answers are put together beside the event loop. A
project that sends hundreds of them at once waits for its own threads alone.

While a text is tokenized, each of its tokens takes about 240 bytes, and a text of digits has a
token for each. So a body of 4 MiB takes a gibibyte for seconds. Such texts wait for each other:
one of a project at a time, and two of all. A project waits for those in one place, so that the
projects take turns.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

ResultT = TypeVar("ResultT")

MAX_THREADS = 64
"""Works of all projects at once; more wait."""
MAX_SMALL_TEXT = 2**18
"""A request with more characters of text is a large one."""
MAX_LARGE_TEXTS = 2
"""Large requests whose texts become tokens at once."""


class ProjectThreads:
    """Runs the work of requests in threads, a few of each project at a time.

    A project has so many at a time as half the cores that this process may use, and from 2 to 8.
    """

    def __init__(self) -> None:
        self._max_of_project = min(MAX_THREADS // 8, max(2, len(os.sched_getaffinity(0)) // 2))
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="of-project")
        # Threads of their own use again the memory that the one before them used.
        self._text_threads = ThreadPoolExecutor(MAX_LARGE_TEXTS, thread_name_prefix="large-text")
        self._large_texts = asyncio.Semaphore(MAX_LARGE_TEXTS)
        # Those of a project are dropped once nothing of it runs or waits.
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._text_places: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, project: str, work: Callable[..., ResultT], *args: Any) -> ResultT:
        """Return what work returns that takes milliseconds, once the project has a thread for it.

        Args:
            project: Whose work it is.
            work: Runs in a thread.
            args: Of the work.
        """
        places = self._places.setdefault(project, asyncio.Semaphore(self._max_of_project))
        async with places:
            return await _run_in(self._threads, work, *args)

    async def run_texts(
        self, project: str, num_text: int, work: Callable[..., ResultT], *args: Any
    ) -> ResultT:
        """Return what work makes of texts; the large ones of all projects take turns.

        Args:
            project: Whose texts they are.
            num_text: Characters of those of a request.
            work: Encodes the texts.
            args: Of the work.
        """
        if num_text <= MAX_SMALL_TEXT:
            return await self.run(project, work, *args)
        lock = self._text_places.setdefault(project, asyncio.Lock())
        async with lock, self._large_texts:
            return await _run_in(self._text_threads, work, *args)


async def _run_in(threads: ThreadPoolExecutor, work: Callable[..., ResultT], *args: Any) -> ResultT:
    """Return what work returns; ends with it, also when the request was given up."""
    begin = functools.partial(contextvars.copy_context().run, work, *args)
    running = asyncio.get_running_loop().run_in_executor(threads, begin)
    try:
        return await asyncio.shield(running)
    finally:
        # A thread goes on, and keeps its memory, when its request is given up.
        if not running.done():
            await asyncio.wait([running])
