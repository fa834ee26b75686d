"""Many futures at once, in plain code: all results in order, or each as it arrives.

Asyncio code has `asyncio.gather` and `asyncio.as_completed`, which take these futures as they are.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar, overload

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tinsmith.errors import OperationTimeoutError
from tinsmith.rpc.futures import ResultFuture

T = TypeVar("T")


@overload
def gather(
    futures: Iterable[ResultFuture[T]],
    *,
    timeout: float | None = ...,
    return_exceptions: Literal[False] = ...,
    progress: bool | str = ...,
) -> list[T]: ...
@overload
def gather(
    futures: Iterable[ResultFuture[T]],
    *,
    timeout: float | None = ...,
    return_exceptions: bool,
    progress: bool | str = ...,
) -> list[T | BaseException]: ...
def gather(
    futures: Iterable[ResultFuture[T]],
    *,
    timeout: float | None = None,
    return_exceptions: bool = False,
    progress: bool | str = False,
) -> list[Any]:
    """Wait for futures, and return their results in the order given.

    Args:
        futures: Of samples, steps, operations; of one client or of several.
        timeout: Seconds to wait for all of them; the longest of their own limits by default.
        return_exceptions: Whether a failure takes the place of its result, instead of being raised.
        progress: Whether to show a bar, on a terminal or in a notebook; a text is its label.

    Returns:
        The results.

    Raises:
        OperationTimeoutError: If one did not arrive in time; all of them go on.
        TinsmithError: The first failure in the order given, once all have ended.

    Example:
        >>> futures = [sampler.sample(prompt) for prompt in prompts]
        >>> samples = tinsmith.gather(futures, progress="sampling")
    """
    waiting = list(futures)
    with _progress(len(waiting), progress) as advance:
        for _ in as_completed(waiting, timeout=timeout):
            advance()
    if not return_exceptions:
        return [future.result() for future in waiting]
    failures = [future.exception() for future in waiting]
    pairs = zip(waiting, failures, strict=True)
    return [future.result() if failure is None else failure for future, failure in pairs]


def as_completed(
    futures: Iterable[ResultFuture[T]], *, timeout: float | None = None
) -> Iterator[ResultFuture[T]]:
    """Yield futures as they end, whether with a result or a failure.

    Args:
        futures: Of samples, steps, operations.
        timeout: Seconds to wait for all of them; the longest of their own limits by default.

    Yields:
        Each future once.

    Raises:
        OperationTimeoutError: If not all ended in time.

    Example:
        >>> for future in tinsmith.as_completed(futures):
        ...     print(future.result().sequences[0].tokens)
    """
    waiting = list(futures)
    if timeout is None:
        timeout = max((future.default_timeout_s for future in waiting), default=0.0)
    deadline = time.monotonic() + timeout
    ended: queue.SimpleQueue[ResultFuture[T]] = queue.SimpleQueue()
    for future in waiting:
        future.add_done_callback(ended.put)
    for num_ended in range(len(waiting)):
        try:
            yield ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise OperationTimeoutError(
                f"{num_ended} of {len(waiting)} ended within {timeout:g} s",
                remedy="all of them go on; wait again for longer",
            ) from None


@contextlib.contextmanager
def _progress(total: int, wanted: bool | str) -> Iterator[Callable[[], None]]:
    """Give what is called at each end; it moves a bar where one is wanted and can be seen."""
    console = Console(stderr=True)
    if not wanted or not (console.is_terminal or "ipykernel" in sys.modules):
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(wanted if isinstance(wanted, str) else "waiting", total=total)
        yield lambda: bar.advance(task)
