"""What a list of stop strings may be, at every edge that takes one.

A stop string is looked for in the newest text of a sample after each token. The bounds keep that
search, and the text that is kept for it, short.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith_runtime.errors import InvalidFieldError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 256
"""Longest stop string."""


def check_stop_strings(stop_strings: Sequence[str], field: str) -> None:
    """Refuse stop strings that are too many, too long or empty.

    Args:
        stop_strings: What a sample is to end at.
        field: Where they stand in the request, for the error.

    Raises:
        InvalidFieldError: If one of the bounds is passed.
    """
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise InvalidFieldError(field, f"must be at most {MAX_STOP_STRINGS}")
    if "" in stop_strings:
        raise InvalidFieldError(field, "must not hold an empty string")
    longest = max(map(len, stop_strings), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidFieldError(
            field,
            f"must hold strings of at most {MAX_STOP_CHARACTERS} characters, got one of {longest}",
        )
