"""Object storage by URI: `storage.open("file:///data")`, `storage.open("s3://bucket/prefix")`.

A store keeps immutable objects under paths. A write is complete or absent, never half there; what
belongs together is bound by a manifest that is written last (`checkpoint_manifests`). The calls
block and belong in a thread; each of them ends after a known time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

from tinsmith_runtime.errors import ConfigError, StorageFullError, StorageUnavailableError
from tinsmith_runtime.storage.file import FileStore
from tinsmith_runtime.storage.measured import MeasuredStore
from tinsmith_runtime.storage.objects import FileEntry, Progress, StoredObject, ignore_progress
from tinsmith_runtime.storage.settings import parse_s3_uri

logger = logging.getLogger(__name__)


class ObjectStore(Protocol):
    """A place for immutable objects.

    Any call may raise `StorageUnavailableError` if the store does not answer in time; what a write
    then did is not known, and writing the same again is right.
    """

    @property
    def uri(self) -> str:
        """The URI of the store: no slash at its end, no credentials, no settings."""
        ...

    def probe(self, *, writable: bool = True) -> None:
        """Find out at start whether the store can be used, by using it.

        Raises:
            ConfigError: If it does not exist or refuses this process; says what to do.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Store an object durably, replacing one of the same path.

        Raises:
            StorageFullError: If there is no room; the path is unchanged.
        """
        ...

    def write_new(self, path: str, data: bytes) -> None:
        """Store an object unless another writer did.

        Of several writers at most one is told that it succeeded; where the store knows no
        conditional writes it may be none.

        Raises:
            ObjectExistsError: If the object is another writer's; it is left as it is.
            StorageFullError: If there is no room; the path is unchanged.
        """
        ...

    def write_file(
        self, path: str, local: Path, *, progress: Progress = ignore_progress
    ) -> FileEntry:
        """Store a file as an object, never wholly in memory; return what was stored.

        After a failure the same call goes on with what the store already has.

        Raises:
            StorageFullError: If there is no room; the path is unchanged.
        """
        ...

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return an object.

        Raises:
            ObjectNotFoundError: If there is none at this path.
            ObjectTooLargeError: If it is larger than `max_bytes`.
        """
        ...

    def read_chunks(
        self, path: str, *, offset: int = 0, max_bytes: int | None = None
    ) -> Iterator[bytes]:
        """Yield an object in chunks; a connection that is cut is taken up where it ended.

        Args:
            path: Of the object.
            offset: Where to begin, at most its size.
            max_bytes: What the whole object may have.

        Raises:
            ObjectNotFoundError: If there is none at this path.
            ObjectTooLargeError: If it is larger than `max_bytes`.
            DataLossError: If it was replaced meanwhile.
        """
        ...

    def stat(self, path: str) -> StoredObject:
        """Return what is known of an object.

        Raises:
            ObjectNotFoundError: If there is none at this path.
        """
        ...

    def list_folder(self, path: str) -> list[StoredObject]:
        """Return all objects below a path, by path; below an empty one, all of the store."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store, without reading it here if the store can do that.

        Raises:
            ObjectNotFoundError: If there is none to copy.
            StorageFullError: If there is no room.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove an object; none is fine."""
        ...

    def delete_folder(self, path: str) -> None:
        """Remove all objects below a path, and what interrupted writes left there; none is fine."""
        ...

    def delete_interrupted(self, path: str, *, min_age_s: float) -> int:
        """Remove what writes that were interrupted so long ago left below a path; return how many.

        They are no objects and are not listed, but take room.
        """
        ...

    def presigned_url(self, path: str, *, expires_s: float) -> str | None:
        """Return a URL that downloads an object without credentials.

        None if the store cannot be reached by URL: the object must then be served by a pod.
        """
        ...


def open(  # noqa: A001 - read as `storage.open`
    uri: str, *, environment: Mapping[str, str] | None = None
) -> ObjectStore:
    """Return the store of a URI; nothing is sent to it yet, see `ObjectStore.probe`.

    Args:
        uri: `file:///absolute/path` or `s3://bucket/prefix?endpoint=https://host:port`. Settings of
            an S3 store are `StorageSettings`: parameters of the URI win over `TINSMITH_S3_*`.
        environment: Variables; those of the process by default.

    Raises:
        ConfigError: If the scheme is not supported, a setting is wrong, or there are no
            credentials.
    """
    parsed = urlparse(uri)
    if parsed.scheme == "file" and parsed.netloc in ("", "localhost") and parsed.path:
        return MeasuredStore(FileStore(Path(unquote(parsed.path))))
    if parsed.scheme == "s3":
        variables = os.environ if environment is None else environment
        location, settings = parse_s3_uri(uri, variables)
        try:
            from tinsmith_runtime.storage.s3.store import S3Store
        except ModuleNotFoundError as error:
            raise ConfigError("S3 storage is not installed; install tinsmith[s3]") from error
        return MeasuredStore(S3Store(location, settings, variables))
    raise ConfigError(
        f"storage URI {_without_query(uri)!r} is not supported; use file:///absolute/path or "
        "s3://bucket/prefix"
    )


def probe_at_start(store: ObjectStore, *, writable: bool = True) -> None:
    """Refuse to start on a store that cannot be used; one that is away may come back.

    Raises:
        ConfigError: If it does not exist or refuses this process; says what to do.
    """
    try:
        store.probe(writable=writable)
    except (StorageUnavailableError, StorageFullError) as error:
        logger.warning("the object store cannot be used yet", extra={"problem": error.message})


def _without_query(uri: str) -> str:
    return uri.partition("?")[0]
