"""Text that may still become a mark: what a reader of a stream has to hold back."""

from __future__ import annotations

from collections.abc import Sequence


def held_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text that is a proper beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(mark) > length and mark.startswith(end) for mark in marks):
            return length
    return 0
