"""Futures: `.result()` in plain code, `await` in any asyncio loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from tinsmith.errors import ClientClosedError, OperationTimeoutError, TinsmithError
from tinsmith.rpc.event_loop_thread import BackgroundLoop, wait_done
from tinsmith.types import OperationMetadata

T_co = TypeVar("T_co", covariant=True)


class ResultFuture(Generic[T_co]):
    """A result that arrives later. Waiting and looking never change what the server does."""

    def __init__(
        self,
        background: BackgroundLoop,
        *,
        what: str,
        default_timeout_s: float,
        future: concurrent.futures.Future[T_co] | None = None,
    ) -> None:
        self._background = background
        self._what = what
        self._default_timeout_s = default_timeout_s
        self._future: concurrent.futures.Future[T_co] = (
            future if future is not None else concurrent.futures.Future()
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._what}, {self._describe_state()})"

    @property
    def default_timeout_s(self) -> float:
        """Seconds that `result()` waits unless it is told otherwise."""
        return self._default_timeout_s

    def done(self) -> bool:
        """Return whether a result or a failure is there."""
        return self._future.done()

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call a function with this future once it ends, or at once if it has.

        Args:
            callback: Called in a thread of the client, so it must be short and must not wait.
        """
        self._future.add_done_callback(lambda _: callback(self))

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the result and return it.

        Args:
            timeout: Seconds to wait; the client's `operation_timeout_s` by default.

        Raises:
            OperationTimeoutError: If it did not arrive in time; it names what the server waits
                for. The operation goes on, and `result` may be called again.
            TinsmithError: If the operation failed.
        """
        self._wait(timeout)
        return self._outcome()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the failure, or None if there is a result.

        Raises:
            OperationTimeoutError: If neither arrived in time.
        """
        self._wait(timeout)
        return self._failure()

    async def result_async(self, timeout: float | None = None) -> T_co:
        """Wait for the result without blocking the running event loop, and return it.

        Raises:
            OperationTimeoutError: As `result`.
            TinsmithError: As `result`.
        """
        self._check_process()
        timeout_s = self._default_timeout_s if timeout is None else timeout
        if not await _wait_done(self._future, timeout_s):
            waiting_for = await self._background.acall(self._describe())
            raise self._timeout_error(timeout_s, waiting_for)
        return self._outcome()

    def __await__(self) -> Generator[Any, None, T_co]:
        return self.result_async().__await__()

    def _wait(self, timeout_s: float | None) -> None:
        if self._background.is_current_thread and not self._future.done():
            raise RuntimeError("a blocking wait inside the client's own event loop; await instead")
        self._check_process()
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        if not wait_done(self._future, timeout_s):
            raise self._timeout_error(timeout_s, self._background.call(self._describe()))

    def _check_process(self) -> None:
        """Refuse to wait for what arrives in another process; what is there can be looked at."""
        if not self._future.done():
            self._background.check_process()

    def _failure(self) -> BaseException | None:
        self._note_seen()
        if self._future.cancelled():
            return ClientClosedError(f"{self._what}: the client was closed")
        error = self._future.exception()
        # Each raise adds its frames to the trace; start anew for each look.
        return error if error is None else error.with_traceback(None)

    def _outcome(self) -> T_co:
        error = self._failure()
        if error is not None:
            raise error
        return self._future.result()

    def _describe_state(self) -> str:
        """Return how it stands, without asking the server and without noting that it was seen."""
        if not self._future.done():
            return "running"
        if self._future.cancelled():
            return "cancelled"
        error = self._future.exception()
        if error is None:
            return "succeeded"
        said = error.message if isinstance(error, TinsmithError) else str(error)
        return f"failed: {said}"

    def _timeout_error(self, timeout_s: float, waiting_for: str) -> OperationTimeoutError:
        reported = f"; the server reports: {waiting_for}" if waiting_for else ""
        return OperationTimeoutError(
            f"{self._what} did not finish within {timeout_s:g} s{reported}",
            waiting_for=waiting_for,
            remedy="it goes on; call result() again to wait longer",
        )

    async def _describe(self) -> str:
        """Return what the server says about the delay; empty if it cannot say."""
        return ""

    def _note_seen(self) -> None:
        """Note that the caller's code learns the outcome now."""


class Ready:
    """A handle that is there already, and may be asked for as the result of a future.

    Programs for Tinker write `create_sampling_client(...).result()`, where that call returns a
    future; here it returns the handle itself.
    """

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self, timeout: float | None = None) -> Self:
        """Return this handle at once, whatever the timeout."""
        del timeout
        return self

    async def result_async(self, timeout: float | None = None) -> Self:
        """Return this handle at once, whatever the timeout."""
        return self.result(timeout)


@dataclass(slots=True)
class KnownOutcome:
    """What the caller can know about an operation; shared by its future and its run."""

    known: bool = False
    """Whether the server's answer arrived."""
    failed: bool = False
    seen: bool = False
    """Whether the caller's code looked at it."""
    closes_accumulation: bool = False
    """Whether the gradient was applied or cleared, so that failures before it are history."""

    @property
    def is_observed(self) -> bool:
        """Whether the caller knows it: a success that arrived, or a failure looked at."""
        return self.known and (self.seen or not self.failed)


class OperationFuture(ResultFuture[T_co]):
    """The result of one operation of a run.

    Attributes:
        sequence_number: The operation's place in the run's order.
        kind: `forward`, `forward_backward`, `optim_step`, `save_checkpoint` or `load_checkpoint`;
            empty for an earlier operation until the server was heard.
        operation_name: Resource name of the operation.
        outcome: What the caller can know about it.
    """

    def __init__(
        self,
        background: BackgroundLoop,
        *,
        kind: str,
        sequence_number: int,
        operation_name: str,
        default_timeout_s: float,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(
            background, what=f"{kind} {operation_name}".strip(), default_timeout_s=default_timeout_s
        )
        self.kind = kind
        self.sequence_number = sequence_number
        self.operation_name = operation_name
        self.outcome = KnownOutcome()
        self._refresh = refresh
        self._metadata: OperationMetadata | None = None

    def __repr__(self) -> str:
        kind = self.kind or "operation"
        return f"OperationFuture(#{self.sequence_number} {kind}, {self._describe_state()})"

    @property
    def metadata(self) -> OperationMetadata | None:
        """How the operation stood when the server was last heard; None before that."""
        return self._metadata

    def deliver_metadata(self, metadata: OperationMetadata) -> None:
        """Note how the operation stands. Used by the run."""
        self._metadata = metadata
        self.kind = self.kind or metadata.kind

    def deliver(self, value: Any, *, closes_accumulation: bool) -> None:
        """Set the result. Used by the run."""
        self.outcome.closes_accumulation = closes_accumulation
        self.outcome.known = True
        self._future.set_result(value)

    def deliver_error(
        self, error: Exception, *, known: bool, closes_accumulation: bool = False
    ) -> None:
        """Set the failure. Used by the run.

        Args:
            error: What `result` raises.
            known: False if the operation may yet succeed on the server.
            closes_accumulation: Whether the server cleared the gradient.
        """
        self.outcome.failed = True
        self.outcome.closes_accumulation = closes_accumulation
        self.outcome.known = known
        self._future.set_exception(error)

    async def _describe(self) -> str:
        await self._refresh()
        if self._metadata is None:
            return "the operation was not accepted yet"
        position = self._metadata.queue_position
        state = (
            f"{self._metadata.state} at position {position}" if position else self._metadata.state
        )
        return f"{state}, {self._metadata.waiting_for}" if self._metadata.waiting_for else state

    def _note_seen(self) -> None:
        self.outcome.seen = True


async def _wait_done(future: concurrent.futures.Future[Any], timeout_s: float) -> bool:
    """Wait in the running loop; return whether the future is done. Never cancels it."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def wake(_: concurrent.futures.Future[Any]) -> None:
        with suppress(RuntimeError):  # The caller's loop was closed meanwhile.
            loop.call_soon_threadsafe(event.set)

    future.add_done_callback(wake)
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return future.done()
    return True
