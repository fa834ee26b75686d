"""Marks of calls, from which `generate_forms.py` writes the forms that users get.

They change nothing at run time: a call is written once, as a coroutine of the background loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def call(function: FunctionT) -> FunctionT:
    """Mark `async def _x`: users get `x`, which blocks, and `x_async`."""
    return function


def future(what: str) -> Callable[[FunctionT], FunctionT]:
    """Mark `async def _x`: users get `x`, which returns a future, and `x_async`, which awaits it.

    Args:
        what: What the future is of, for messages; names of parameters in braces.
    """
    del what  # Read from the source by the generator.

    def mark(function: FunctionT) -> FunctionT:
        return function

    return mark


def submits(function: FunctionT) -> FunctionT:
    """Mark `def x`, which submits and returns a future at once: users also get `x_async`."""
    return function


def awaited(function: FunctionT) -> FunctionT:
    """Mark `def x`, which returns a future at once: users also get `x_async`, which awaits it."""
    return function
