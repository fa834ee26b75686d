"""Futures: `.result()` in plain code, `await` in any asyncio loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from tinsmith.background import BackgroundLoop
from tinsmith.errors import OperationTimeoutError, TinsmithError
from tinsmith.types import OperationMetadata

T = TypeVar("T")


class ResultFuture(Generic[T]):
    """A result that arrives later. Waiting and looking never change what the server does."""

    def __init__(
        self,
        background: BackgroundLoop,
        *,
        what: str,
        default_timeout_s: float,
        future: concurrent.futures.Future[T] | None = None,
    ) -> None:
        self._background = background
        self._what = what
        self._default_timeout_s = default_timeout_s
        self._future: concurrent.futures.Future[T] = (
            future if future is not None else concurrent.futures.Future()
        )

    def done(self) -> bool:
        """Return whether a result or a failure is there."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result and return it.

        Args:
            timeout_s: How long to wait; the client's `operation_timeout_s` by default.

        Raises:
            OperationTimeoutError: If it did not arrive in time; it names what the server waits
                for. The operation goes on, and `result` may be called again.
            TinsmithError: If the operation failed.
        """
        if self._background.is_current_thread and not self._future.done():
            raise RuntimeError("result() inside the client's own event loop; await instead")
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        done, _ = concurrent.futures.wait([self._future], timeout=timeout_s)
        if not done:
            raise self._timeout_error(timeout_s, self._background.call(self._describe()))
        self._note_seen()
        return self._outcome()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait, and return the failure, or None if there is a result.

        Raises:
            OperationTimeoutError: If neither arrived in time.
        """
        try:
            self.result(timeout_s)
        except OperationTimeoutError:
            if not self._future.done():
                raise
        except (TinsmithError, concurrent.futures.CancelledError):
            pass
        if self._future.cancelled():
            return concurrent.futures.CancelledError()
        return self._future.exception()

    async def result_async(self, timeout_s: float | None = None) -> T:
        """Wait for the result without blocking the running event loop, and return it.

        Raises:
            OperationTimeoutError: As `result`.
            TinsmithError: As `result`.
        """
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        if not await _wait_done(self._future, timeout_s):
            waiting_for = await self._background.acall(self._describe())
            raise self._timeout_error(timeout_s, waiting_for)
        self._note_seen()
        return self._outcome()

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def _outcome(self) -> T:
        error = None if self._future.cancelled() else self._future.exception()
        if isinstance(error, TinsmithError):
            # The trace grows by the frames of each raise; start anew for each look.
            raise error.with_traceback(None)
        return self._future.result()

    def _timeout_error(self, timeout_s: float, waiting_for: str) -> OperationTimeoutError:
        reported = f"; the server reports: {waiting_for}" if waiting_for else ""
        return OperationTimeoutError(
            f"{self._what} did not finish within {timeout_s:g} s{reported}",
            metadata={"waiting_for": waiting_for},
            remedy="it goes on; call result() again to wait longer",
        )

    async def _describe(self) -> str:
        """Return what the server says about the delay; empty if it can not say."""
        return ""

    def _note_seen(self) -> None:
        """Note that the caller's code learns the outcome now."""


class OperationFuture(ResultFuture[T]):
    """The result of one operation of a run.

    Attributes:
        sequence_number: The operation's place in the run's order.
        kind: `forward`, `forward_backward`, `optim_step`, `save_checkpoint` or `load_checkpoint`.
        operation_name: Resource name of the operation.
    """

    def __init__(
        self,
        background: BackgroundLoop,
        *,
        kind: str,
        sequence_number: int,
        operation_name: str,
        default_timeout_s: float,
        refresh: Callable[[OperationFuture[Any]], Awaitable[None]],
    ) -> None:
        super().__init__(
            background, what=f"{kind} {operation_name}", default_timeout_s=default_timeout_s
        )
        self.kind = kind
        self.sequence_number = sequence_number
        self.operation_name = operation_name
        self._refresh = refresh
        self._metadata: OperationMetadata | None = None
        self._outcome_known = False
        self._seen = False

    @property
    def metadata(self) -> OperationMetadata | None:
        """How the operation stood when the server was last heard; None before that."""
        return self._metadata

    @property
    def is_observed(self) -> bool:
        """Whether the caller knows the outcome: a success that arrived, a failure looked at."""
        if not self._outcome_known or not self._future.done():
            return False
        return self._seen or self._future.exception() is None

    def deliver_metadata(self, metadata: OperationMetadata) -> None:
        """Note how the operation stands. Used by the run."""
        self._metadata = metadata

    def deliver(self, value: T) -> None:
        """Set the result. Used by the run."""
        self._outcome_known = True
        self._future.set_result(value)

    def deliver_error(self, error: Exception, *, outcome_known: bool) -> None:
        """Set the failure. Used by the run.

        Args:
            error: What `result` raises.
            outcome_known: False if the operation may yet succeed on the server.
        """
        self._outcome_known = outcome_known
        self._future.set_exception(error)

    async def _describe(self) -> str:
        await self._refresh(self)
        if self._metadata is None:
            return "the operation was not accepted yet"
        state = self._metadata.state
        return f"{state}, {self._metadata.waiting_for}" if self._metadata.waiting_for else state

    def _note_seen(self) -> None:
        self._seen = True


class MappedFuture(OperationFuture[T]):
    """An operation's future whose result is finished on the client."""

    def __init__(self, inner: OperationFuture[Any], transform: Callable[[Any], T]) -> None:
        self.__dict__.update(inner.__dict__)
        self._inner = inner
        self._transform = transform

    @property
    def metadata(self) -> OperationMetadata | None:
        """How the operation stood when the server was last heard; None before that."""
        return self._inner.metadata

    def _note_seen(self) -> None:
        self._inner._note_seen()

    def _outcome(self) -> T:
        return self._transform(self._inner._outcome())

    async def _describe(self) -> str:
        return await self._inner._describe()


async def _wait_done(future: concurrent.futures.Future[Any], timeout_s: float) -> bool:
    """Wait in the running loop; return whether the future is done. Never cancels it."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def wake(_: concurrent.futures.Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    future.add_done_callback(wake)
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return future.done()
    return True


def gather_coroutines(coroutines: list[Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, list[T]]:
    """Return one coroutine that runs all at once."""

    async def run() -> list[T]:
        return list(await asyncio.gather(*coroutines))

    return run()
