"""What all stores share: how objects are named, and what is known of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from tinsmith_runtime.errors import AlreadyExistsError, DataLossError, NotFoundError

CHUNK_BYTES = 2**20
"""How much of an object is in memory at once where it is streamed."""

Progress = Callable[[int, int], None]
"""Told how many bytes are done, and how many there are; called from the thread of the call."""


class ObjectNotFoundError(NotFoundError):
    """The store has no object at this path."""

    reason = "RESOURCE_NOT_FOUND"


class ObjectExistsError(AlreadyExistsError):
    """Another writer put an object at this path."""

    reason = "RESOURCE_ALREADY_EXISTS"


class ObjectTooLargeError(DataLossError):
    """An object has more bytes than its reader expects; none of them was read."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object without its content.

    Attributes:
        path: Where it is in the store.
        size_bytes: Its size.
        modified_time_s: When it was written, by the clock of the store.
    """

    path: str
    size_bytes: int
    modified_time_s: float


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as a manifest names it: its size, and the SHA-256 of its content in hex."""

    size_bytes: int
    sha256: str


def check_size(store: str, path: str, size_bytes: int, max_bytes: int | None) -> None:
    """Refuse an object, of a store of this URI, that is larger than its reader expects.

    Raises:
        ObjectTooLargeError: If it is larger than `max_bytes`.
    """
    if max_bytes is not None and size_bytes > max_bytes:
        raise ObjectTooLargeError(
            f"{store}/{path} has {size_bytes} bytes, at most {max_bytes} are expected", path=path
        )


def split_path(path: str) -> tuple[str, ...]:
    """Return the parts of an object path.

    Raises:
        ValueError: If it is empty, absolute, or leads out of the store.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise ValueError(f"{path!r} is not a relative object path")
    return parts


def ignore_progress(_done_bytes: int, _total_bytes: int) -> None:
    """Stand in where progress is of no interest."""
