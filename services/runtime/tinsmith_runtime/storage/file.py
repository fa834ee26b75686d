"""A store in a folder: each write goes to a temporary file, is synced, then renamed into place."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from tinsmith_runtime.errors import ConfigError, StorageFullError
from tinsmith_runtime.storage.objects import (
    CHUNK_BYTES,
    FileEntry,
    ObjectExistsError,
    ObjectNotFoundError,
    Progress,
    StoredObject,
    check_size,
    ignore_progress,
    split_path,
)

_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TEMPORARY_PREFIX = ".writing-"


class FileStore:
    """Objects as files below a root folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def uri(self) -> str:
        """The URI of the root."""
        return f"file://{quote(str(self._root))}"

    def probe(self, *, writable: bool = True) -> None:
        """Make the root folder; see `ObjectStore.probe`."""
        try:
            if writable:
                with full_disk_is_typed(self._root):
                    self._root.mkdir(parents=True, exist_ok=True)
            if self._root.exists() and not os.access(
                self._root, os.R_OK | os.X_OK | (os.W_OK if writable else 0)
            ):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigError(
                f"the store {self._root} cannot be used: {error.strerror}; create the folder and "
                "give it to the user of this process"
            ) from error

    def write(self, path: str, data: bytes) -> None:
        """Store an object durably; see `ObjectStore.write`."""
        self._write(path, [data], lambda temporary, target: temporary.replace(target))

    def write_new(self, path: str, data: bytes) -> None:
        """Store an object unless there is one; see `ObjectStore.write_new`."""

        def link(temporary: Path, target: Path) -> None:
            # Unlike a rename, a link fails if the name is taken.
            os.link(temporary, target)
            temporary.unlink()

        try:
            self._write(path, [data], link)
        except FileExistsError as error:
            raise ObjectExistsError(f"{self.uri}/{path} exists", path=path) from error

    def write_file(
        self, path: str, local: Path, *, progress: Progress = ignore_progress
    ) -> FileEntry:
        """Store a file; see `ObjectStore.write_file`."""
        digest, num_bytes = hashlib.sha256(), 0

        def chunks() -> Iterator[bytes]:
            nonlocal num_bytes
            with local.open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    progress(num_bytes, max(size_bytes, num_bytes))
                    yield chunk

        self._write(path, chunks(), lambda temporary, target: temporary.replace(target))
        return FileEntry(num_bytes, digest.hexdigest())

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return an object; see `ObjectStore.read`."""
        return b"".join(self.read_chunks(path, max_bytes=max_bytes))

    def read_chunks(
        self, path: str, *, offset: int = 0, max_bytes: int | None = None
    ) -> Iterator[bytes]:
        """Yield an object in chunks; see `ObjectStore.read_chunks`."""
        with self._missing_is_typed(path), self._resolve(path).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            check_size(self.uri, path, size_bytes, max_bytes)
            file.seek(offset)
            left_bytes = max(0, size_bytes - offset)
            while chunk := file.read(min(CHUNK_BYTES, left_bytes)):
                left_bytes -= len(chunk)
                yield chunk

    def stat(self, path: str) -> StoredObject:
        """Return what is known of an object; see `ObjectStore.stat`."""
        target = self._resolve(path)
        with self._missing_is_typed(path):
            if not target.is_file():
                raise FileNotFoundError
            status = target.stat()
        return StoredObject("/".join(split_path(path)), status.st_size, status.st_mtime)

    def list_folder(self, path: str) -> list[StoredObject]:
        """Return all objects below a path; see `ObjectStore.list_folder`."""
        folder = self._resolve(path) if path else self._root
        found = []
        for target in _files(folder):
            if not target.name.startswith(_TEMPORARY_PREFIX):
                try:
                    status = target.stat()
                except FileNotFoundError:
                    continue
                name = target.relative_to(self._root).as_posix()
                found.append(StoredObject(name, status.st_size, status.st_mtime))
        return sorted(found, key=lambda each: each.path)

    def copy(self, source: str, target: str) -> None:
        """Copy an object; see `ObjectStore.copy`."""
        self._write(target, self.read_chunks(source), lambda a, b: a.replace(b))

    def delete(self, path: str) -> None:
        """Remove an object."""
        target = self._resolve(path)
        try:
            target.unlink()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        _sync_folder(target.parent)

    def delete_folder(self, path: str) -> None:
        """Remove all objects below a path."""
        shutil.rmtree(self._resolve(path), ignore_errors=True)

    def delete_interrupted(self, path: str, *, min_age_s: float) -> int:
        """Remove old temporary files; see `ObjectStore.delete_interrupted`."""
        num_deleted = 0
        for target in _files(self._resolve(path) if path else self._root):
            if target.name.startswith(_TEMPORARY_PREFIX):
                try:
                    if time.time() - target.stat().st_mtime >= min_age_s:
                        target.unlink()
                        num_deleted += 1
                except FileNotFoundError:
                    continue
        return num_deleted

    def presigned_url(self, path: str, *, expires_s: float) -> str | None:  # noqa: ARG002
        """Return None: a folder has no server of its own."""
        self._resolve(path)
        return None

    def _write(
        self, path: str, chunks: Iterable[bytes], name: Callable[[Path, Path], object]
    ) -> None:
        """Write a temporary file, sync it, and give it its name."""
        target = self._resolve(path)
        temporary: Path | None = None
        with full_disk_is_typed(self._root):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                handle, temporary_name = tempfile.mkstemp(
                    prefix=_TEMPORARY_PREFIX, dir=target.parent
                )
                temporary = Path(temporary_name)
                with os.fdopen(handle, "wb") as file:
                    for chunk in chunks:
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                name(temporary, target)
                _sync_folder(target.parent)
            except BaseException:
                if temporary is not None:
                    temporary.unlink(missing_ok=True)
                raise

    def _resolve(self, path: str) -> Path:
        return self._root.joinpath(*split_path(path))

    @contextmanager
    def _missing_is_typed(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise ObjectNotFoundError(f"{self.uri}/{path} does not exist", path=path) from error


@contextmanager
def full_disk_is_typed(folder: Path) -> Iterator[None]:
    """Raise `StorageFullError` where the disk of a folder is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL_ERRNOS:
            raise
        raise StorageFullError(
            f"the disk of {folder} is full; free space, then send the request again",
            path=folder,
        ) from error


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder; what is deleted meanwhile may be missing."""
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable: the folder's own entry table is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
