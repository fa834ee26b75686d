"""Pages of lists that a pod keeps in memory, ordered by a text key.

A token holds the key of the last entry of its page, so entries that come or go between two calls
shift no other entry. An entry that is there all the while appears exactly once. Lists in a database
continue after a serial number instead.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from tinsmith_runtime.errors import InvalidFieldError

_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1_000
_DIGEST_BYTES = 8

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
    if not 0 <= request.page_size <= _MAX_PAGE_SIZE:
        raise InvalidFieldError("page_size", f"must be 1 to {_MAX_PAGE_SIZE}")
    size = request.page_size or _DEFAULT_PAGE_SIZE
    after = _decode_token(list_name, request.page_token)
    keyed = sorted(((key(entry), entry) for entry in entries), key=lambda pair: pair[0])
    rest = [pair for pair in keyed if after is None or pair[0] > after]
    shown = rest[:size]
    token = _encode_token(list_name, shown[-1][0]) if len(rest) > size else ""
    return [entry for _, entry in shown], token


def _encode_token(list_name: str, last_key: str) -> str:
    body = last_key.encode()
    return base64.urlsafe_b64encode(_digest(list_name, body) + body).decode().rstrip("=")


def _decode_token(list_name: str, token: str) -> str | None:
    if not token:
        return None
    try:
        content = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        content = b""
    digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    # The digest is no secret: every list shows only what its caller may see, whatever the token.
    if digest != _digest(list_name, body):
        raise InvalidFieldError("page_token", "is not a next_page_token of this list")
    return body.decode()


def _digest(list_name: str, body: bytes) -> bytes:
    return hashlib.sha256(list_name.encode() + b"\0" + body).digest()[:_DIGEST_BYTES]
