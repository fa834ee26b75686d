"""Lists of JSON bodies, which are refused at their first wrong item."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import FailFast

ItemT = TypeVar("ItemT")


class _FirstError(FailFast):
    """Ends at the first error: one for each of millions of items would cost gigabytes."""

    def __hash__(self) -> int:
        # Members of a union have to be hashable.
        return hash(self.fail_fast)


List = Annotated[list[ItemT], _FirstError()]
"""A list of a body."""
