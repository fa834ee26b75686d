"""Waiting for what a pod does by itself: a condition is looked at again until it holds.

The bounds are for a test that hangs. They are wide, since a busy machine must not fail a test.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
TIMEOUT_S = 180.0
# Most conditions hold after a few steps of the event loop; longer waits leave the core to others.
_EAGER_LOOKS = 200


async def eventually(
    condition: Callable[[], T | Awaitable[T | None] | None], *, timeout_s: float = TIMEOUT_S
) -> T:
    """Return the first true answer of a condition, which may be awaitable.

    Raises:
        TimeoutError: the condition did not hold in time.
    """
    looks = 0
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            answer = await found if inspect.isawaitable(found) else found
            if answer:
                return answer
            looks += 1
            await asyncio.sleep(0 if looks < _EAGER_LOOKS else 0.002)


def until(condition: Callable[[], T | None], *, timeout_s: float = TIMEOUT_S) -> T:
    """Return the first true answer of a condition that other threads or processes bring about.

    Raises:
        TimeoutError: the condition did not hold in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not so after {timeout_s:g} s")
        time.sleep(0.005)
    return answer
