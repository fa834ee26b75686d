"""Pages of lists that a pod keeps in memory, ordered by a text key.

A token holds the key of the last entry of its page, so entries that come or go between two calls
shift no other entry. An entry that is there all the while appears exactly once. Lists in a database
continue after a serial number instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from tinsmith_runtime.rpc.requests import decode_key_token, decode_page_size, encode_key_token

Entry = TypeVar("Entry")


class PagedRequest(Protocol):
    """The fields that every request for a list has."""

    page_size: int
    page_token: str


def take_page(
    list_name: str, entries: Iterable[Entry], key: Callable[[Entry], str], request: PagedRequest
) -> tuple[list[Entry], str]:
    """Return the entries of one page in the order of their keys, and the token of the next page.

    Args:
        list_name: What tells the list from others, its parent and filters included. A token of
            another list is refused.
        entries: All entries that the caller may see.
        key: Returns the key of an entry; no two entries may have the same.
        request: Gives `page_size` and `page_token`.

    Returns:
        At most `page_size` entries, and a token that is empty at the end of the list.

    Raises:
        InvalidFieldError: If the size is out of range, or the token is none of this list.
    """
    size = decode_page_size(request.page_size)
    after = decode_key_token(list_name, request.page_token)
    keyed = sorted(((key(entry), entry) for entry in entries), key=lambda pair: pair[0])
    rest = [pair for pair in keyed if after is None or pair[0] > after]
    shown = rest[:size]
    token = encode_key_token(list_name, shown[-1][0]) if len(rest) > size else ""
    return [entry for _, entry in shown], token
