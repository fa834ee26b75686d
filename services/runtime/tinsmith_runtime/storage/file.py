"""A store in a folder: each write goes to a temporary file, is synced, then renamed into place."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from tinsmith_runtime.errors import DataLossError, NotFoundError, StorageFullError

_WRITING_PREFIX = ".writing-"
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ObjectNotFoundError(NotFoundError):
    """The store has no object at this path."""

    reason = "RESOURCE_NOT_FOUND"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object of a list.

    Attributes:
        path: As it was written.
        modify_time_s: When it was last written, by the clock of the store.
    """

    path: str
    size_bytes: int
    modify_time_s: float


class FileStore:
    """Objects as files below a root folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def uri(self) -> str:
        """The URI of the root."""
        return f"file://{quote(str(self._root))}"

    def write(self, path: str, data: bytes) -> None:
        """Store an object durably; see `ObjectStore.write`."""
        target = self._resolve(path)
        temporary: Path | None = None
        with self._full_disk_is_typed():
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(prefix=_WRITING_PREFIX, dir=target.parent)
                temporary = Path(name)
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
                _sync_folder(target.parent)
            except OSError:
                if temporary is not None:
                    temporary.unlink(missing_ok=True)
                raise

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return an object; see `ObjectStore.read`."""
        target = self._resolve(path)
        try:
            size_bytes = target.stat().st_size
            if max_bytes is not None and size_bytes > max_bytes:
                raise DataLossError(
                    f"{self.uri}/{path} has {size_bytes} bytes, at most {max_bytes} are expected",
                    path=path,
                )
            return target.read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise ObjectNotFoundError(f"{self.uri}/{path} does not exist", path=path) from error

    def list_folder(self, path: str) -> list[ObjectInfo]:
        """Return all objects below a path; see `ObjectStore.list_folder`."""
        found = []
        for folder, _, names in os.walk(self._resolve(path)):
            for name in names:
                file = Path(folder) / name
                if name.startswith(_WRITING_PREFIX):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = file.stat()
                    relative = file.relative_to(self._root).as_posix()
                    found.append(ObjectInfo(relative, stat.st_size, stat.st_mtime))
        return found

    def delete(self, path: str) -> None:
        """Remove an object; none is fine."""
        self._resolve(path).unlink(missing_ok=True)

    def delete_folder(self, path: str) -> None:
        """Remove all objects below a path."""
        shutil.rmtree(self._resolve(path), ignore_errors=True)

    def _resolve(self, path: str) -> Path:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts:
            raise ValueError(f"{path!r} is not a relative object path")
        return self._root.joinpath(*parts)

    @contextmanager
    def _full_disk_is_typed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL_ERRNOS:
                raise
            raise StorageFullError(
                f"the disk of {self._root} is full; free space, then send the request again",
                path=self._root,
            ) from error


def _sync_folder(folder: Path) -> None:
    """Make a rename durable: the folder's own entry table is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
