"""Object storage by URI: `storage.open("file:///data")`.

A store keeps immutable objects under paths. A write is complete or absent, never half there; what
belongs together is bound by a manifest that is written last (`tinsmith_runtime.manifests`). The
calls block and belong in a thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.storage.file import FileStore, ObjectInfo

__all__ = ["FileStore", "ObjectInfo", "ObjectStore", "open"]


class ObjectStore(Protocol):
    """A place for immutable objects."""

    @property
    def uri(self) -> str:
        """The URI of the store, without a slash at its end."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Store an object durably, replacing one of the same path.

        Raises:
            StorageFullError: If there is no room; the path is unchanged.
        """
        ...

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return an object.

        Raises:
            ObjectNotFoundError: If there is none at this path.
            DataLossError: If it is larger than `max_bytes`.
        """
        ...

    def list_folder(self, path: str) -> list[ObjectInfo]:
        """Return all objects below a path, in no order; a path without any has none."""
        ...

    def delete(self, path: str) -> None:
        """Remove an object; none is fine."""
        ...

    def delete_folder(self, path: str) -> None:
        """Remove all objects below a path; none is fine."""
        ...


def open(uri: str) -> ObjectStore:  # noqa: A001 - read as `storage.open`
    """Return the store of a URI.

    Raises:
        ConfigError: If the scheme is not supported.
    """
    parsed = urlparse(uri)
    if parsed.scheme == "file" and parsed.netloc in ("", "localhost") and parsed.path:
        return FileStore(Path(unquote(parsed.path)))
    raise ConfigError(f"storage URI {uri!r} is not supported; use file:///absolute/path")
