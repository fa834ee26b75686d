"""One thread with an event loop, in which all network work of a client happens.

User code stays synchronous, or runs in its own event loop; either way it only hands coroutines over
and waits for results. A long poll or a heartbeat never depends on what the user's code does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from tinsmith.errors import ClientClosedError

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


_SIGNAL_CHECK_S = 1.0

_OPEN: weakref.WeakSet[BackgroundLoop] = weakref.WeakSet()
"""Loops that were not closed, in a forked process those of its parent too."""


class BackgroundLoop:
    """Runs coroutines in a daemon thread. Safe to use from any thread but its own.

    A fork copies neither the thread nor those of gRPC, whose state is then that of a call which
    never ends: in a process that was forked while a loop was open, no loop can be used or made.

    Raises:
        ClientClosedError: If this process was forked while a loop was open.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        for other in list(_OPEN):
            other.check_process()
        _OPEN.add(self)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(handle_loop_exception)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tinsmith-client", daemon=True)
        self._thread.start()

    @property
    def is_of_parent(self) -> bool:
        """Whether it was left behind in the process that this one was forked from."""
        return self._process_id != os.getpid()

    def check_process(self) -> None:
        """Refuse to be used in a forked process, where every call would wait for ever.

        Raises:
            ClientClosedError: If it was left behind by a fork.
        """
        if self.is_of_parent:
            raise ClientClosedError(
                "this process was forked while a Client was open, which gRPC does not survive",
                remedy='start processes with multiprocessing.get_context("spawn"), or close every '
                "Client before the fork",
            )

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs inside the loop, where waiting would block it for ever."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine and return a future of its result.

        Raises:
            ClientClosedError: If the loop was closed, or left behind by a fork.
        """
        if self.is_of_parent:
            coroutine.close()
            self.check_process()
        with self._lock:
            if self._closed:
                coroutine.close()
                raise ClientClosedError("the client is closed", remedy="open a new Client")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; blocks the calling thread."""
        if self.is_current_thread:
            coroutine.close()
            raise RuntimeError("a blocking call inside the client's own event loop; await instead")
        future = self.submit(coroutine)
        try:
            wait_done(future)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; to be awaited in the user's event loop."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def iterate(self, stream: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield what a stream yields, and close it in the end, however the iteration ends.

        An exception in the calling thread, such as Ctrl-C, finds the stream in the middle of a
        read, which may just have been handed over: it is given up, and the stream closed after it.
        """
        reading = asyncio.Lock()
        last_read: list[asyncio.Task[Any] | None] = [None]

        async def read() -> tuple[T, ...]:
            last_read[0] = asyncio.current_task()
            async with reading:
                async for element in stream:
                    return (element,)
                return ()

        async def close() -> None:
            if last_read[0] is not None:
                last_read[0].cancel()
            async with reading:
                await stream.aclose()

        try:
            while found := self.call(read()):
                yield found[0]
        finally:
            self.call(close())

    def post(self, callback: Callable[[], object]) -> None:
        """Call something inside the loop; calls run in the order in which they are posted."""
        self.check_process()
        with self._lock:
            if self._closed:
                raise ClientClosedError("the client is closed", remedy="open a new Client")
            self._loop.call_soon_threadsafe(callback)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task from inside the loop and keep it alive."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def close(self) -> None:
        """Cancel what still runs and end the thread. Repeating it changes nothing."""
        if self.is_of_parent:
            return
        _OPEN.discard(self)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_current_thread:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("background task failed", exc_info=task.exception())


def wait_done(future: concurrent.futures.Future[Any], timeout_s: float = float("inf")) -> bool:
    """Wait for a future in the calling thread; return whether it is done.

    A signal that arrives just before a thread begins to wait is noticed when the wait ends. The
    wait therefore has an end every second, or Ctrl-C could take as long as what is waited for.
    """
    deadline_s = time.monotonic() + timeout_s
    while not future.done():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        concurrent.futures.wait([future], timeout=min(left_s, _SIGNAL_CHECK_S))
    return future.done()


def handle_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what is wrong in an event loop of a process in which several of them use gRPC."""
    # grpc.aio has one wake-up socket for a process. With a second event loop in the process, both
    # wake and one finds the socket empty; that is harmless (github.com/grpc/grpc/issues/25364).
    if isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)
