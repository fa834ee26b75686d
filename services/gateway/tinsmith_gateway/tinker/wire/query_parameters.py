"""Query parameters of lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from tinsmith_runtime.errors import InvalidFieldError

ItemT = TypeVar("ItemT")

_DEFAULT_LIMIT = 100
_MAX_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is wanted."""

    limit: int
    offset: int

    def cut(self, items: Sequence[ItemT]) -> Sequence[ItemT]:
        """Return the part."""
        return items[self.offset : self.offset + self.limit]

    def cursor(self, total: int) -> dict[str, Any]:
        """Return where the part lies in a list."""
        return {"offset": self.offset, "limit": self.limit, "total_count": total}


def page(request: Request) -> Page:
    """Return `limit` and `offset` of a request.

    Raises:
        InvalidFieldError: If one is no number in its range.
    """
    limit = number(request, "limit", _DEFAULT_LIMIT, 1)
    return Page(min(limit, _MAX_LIMIT), number(request, "offset", 0, 0))


def number(request: Request, name: str, default: int, least: int) -> int:
    """Return a number of the query.

    Raises:
        InvalidFieldError: If it is none, or below the least.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < least:
        raise InvalidFieldError(name, f"must be a number of at least {least}, got {text[:64]!r}")
    return int(text)
