"""A store whose requests are counted and timed, whatever kind of store it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from tinsmith_runtime.errors import StorageFullError, StorageRefusedError, StorageUnavailableError
from tinsmith_runtime.observability.metrics import STORE_BYTES, STORE_REQUEST_SECONDS
from tinsmith_runtime.storage.objects import (
    FileEntry,
    ObjectExistsError,
    ObjectNotFoundError,
    Progress,
    StoredObject,
    ignore_progress,
)

if TYPE_CHECKING:
    from tinsmith_runtime.storage import ObjectStore

_OUTCOMES: tuple[tuple[type[Exception], str], ...] = (
    (ObjectNotFoundError, "missing"),
    (ObjectExistsError, "exists"),
    (StorageRefusedError, "refused"),
    (StorageUnavailableError, "unavailable"),
    (StorageFullError, "full"),
)
"""What a request ends with, the most special first."""


class MeasuredStore:
    """Passes calls on to a store, and notes time, outcome and bytes of each.

    A request that the store itself repeats is one request: its time is what a caller waited.

    Args:
        store: What is measured.
        seconds: Takes the time of each request, by operation and outcome.
        num_bytes: Takes the bytes of each request, by direction.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        seconds: Histogram = STORE_REQUEST_SECONDS,
        num_bytes: Counter = STORE_BYTES,
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._num_bytes = num_bytes

    @property
    def uri(self) -> str:
        """See `ObjectStore.uri`."""
        return self._store.uri

    def probe(self, *, writable: bool = True) -> None:
        """See `ObjectStore.probe`."""
        with self._measured("probe"):
            self._store.probe(writable=writable)

    def write(self, path: str, data: bytes) -> None:
        """See `ObjectStore.write`."""
        with self._measured("write"):
            self._store.write(path, data)
        self._num_bytes.labels("written").inc(len(data))

    def write_new(self, path: str, data: bytes) -> None:
        """See `ObjectStore.write_new`."""
        with self._measured("write_new"):
            self._store.write_new(path, data)
        self._num_bytes.labels("written").inc(len(data))

    def write_file(
        self, path: str, local: Path, *, progress: Progress = ignore_progress
    ) -> FileEntry:
        """See `ObjectStore.write_file`."""
        with self._measured("write_file"):
            entry = self._store.write_file(path, local, progress=progress)
        self._num_bytes.labels("written").inc(entry.size_bytes)
        return entry

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """See `ObjectStore.read`."""
        with self._measured("read"):
            data = self._store.read(path, max_bytes=max_bytes)
        self._num_bytes.labels("read").inc(len(data))
        return data

    def read_chunks(
        self, path: str, *, offset: int = 0, max_bytes: int | None = None
    ) -> Iterator[bytes]:
        """See `ObjectStore.read_chunks`."""
        with self._measured("read_chunks"):
            for chunk in self._store.read_chunks(path, offset=offset, max_bytes=max_bytes):
                self._num_bytes.labels("read").inc(len(chunk))
                yield chunk

    def stat(self, path: str) -> StoredObject:
        """See `ObjectStore.stat`."""
        with self._measured("stat"):
            return self._store.stat(path)

    def list_folder(self, path: str) -> list[StoredObject]:
        """See `ObjectStore.list_folder`."""
        with self._measured("list"):
            return self._store.list_folder(path)

    def copy(self, source: str, target: str) -> None:
        """See `ObjectStore.copy`."""
        with self._measured("copy"):
            self._store.copy(source, target)

    def delete(self, path: str) -> None:
        """See `ObjectStore.delete`."""
        with self._measured("delete"):
            self._store.delete(path)

    def delete_folder(self, path: str) -> None:
        """See `ObjectStore.delete_folder`."""
        with self._measured("delete_folder"):
            self._store.delete_folder(path)

    def delete_interrupted(self, path: str, *, min_age_s: float) -> int:
        """See `ObjectStore.delete_interrupted`."""
        with self._measured("delete_interrupted"):
            return self._store.delete_interrupted(path, min_age_s=min_age_s)

    def presigned_url(self, path: str, *, expires_s: float) -> str | None:
        """See `ObjectStore.presigned_url`; nothing is sent."""
        return self._store.presigned_url(path, expires_s=expires_s)

    @contextmanager
    def _measured(self, operation: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        outcome = "failed"
        try:
            yield
            outcome = "ok"
        except GeneratorExit:
            # The reader had enough.
            outcome = "ok"
            raise
        except Exception as error:
            outcome = next((word for kind, word in _OUTCOMES if isinstance(error, kind)), outcome)
            raise
        finally:
            self._seconds.labels(operation, outcome).observe(time.perf_counter() - begin_s)
