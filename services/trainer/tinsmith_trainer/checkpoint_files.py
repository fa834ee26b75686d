"""Files of checkpoints and exports: fetched, put, copied and read in pieces, always verified.

The one module of the trainer that moves large files: nothing here holds a whole file in memory
where the store is a folder of this machine. Another store is read and written object by object.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from tinsmith_runtime import manifests
from tinsmith_runtime.errors import CheckpointCorruptError, NotFoundError, StorageFullError
from tinsmith_runtime.manifests import FileEntry, Manifest, WrittenManifest
from tinsmith_runtime.storage import ObjectStore

PIECE_BYTES = 2**20
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Progress = Callable[[int, int], None]
"""Told how many bytes are done and how many there are; called from a thread."""


class CheckpointFiles:
    """The folders of checkpoints and exports in the store. Methods block and belong in a thread.

    Args:
        store: Where they are.
        scratch: A folder of this machine for files that are being made.
    """

    def __init__(self, store: ObjectStore, scratch: Path) -> None:
        self._store = store
        self._scratch = scratch
        self._pins: Counter[str] = Counter()
        shutil.rmtree(scratch, ignore_errors=True)

    @contextlib.contextmanager
    def pinned(self, folder: str) -> Iterator[None]:
        """Keep a folder while the context lasts, whatever becomes of its checkpoint."""
        self._pins[folder] += 1
        try:
            yield
        finally:
            self._pins[folder] -= 1
            if not self._pins[folder]:
                del self._pins[folder]

    def is_pinned(self, folder: str) -> bool:
        """Whether somebody reads a folder."""
        return folder in self._pins

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a folder on this machine that goes with the context."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def manifest(self, folder: str, sha256: str) -> Manifest:
        """Return the manifest of a folder.

        Raises:
            CheckpointCorruptError: If it is missing or was changed.
        """
        return manifests.read_manifest(self._store, folder, sha256=sha256)

    def fetch(
        self, folder: str, manifest: Manifest, target: Path, names: Collection[str]
    ) -> dict[str, Path]:
        """Return local copies of some files of a folder, verified.

        Raises:
            CheckpointCorruptError: If a file is missing or does not match the manifest.
        """
        found = {}
        for name in names:
            found[name] = target / name
            digest, size_bytes = hashlib.sha256(), 0
            with found[name].open("wb") as file:
                for piece in self._pieces_of(folder, name):
                    digest.update(piece)
                    size_bytes += len(piece)
                    file.write(piece)
            _check(folder, name, manifest, FileEntry(size_bytes, digest.hexdigest()))
        return found

    def put(
        self,
        folder: str,
        files: Mapping[str, Path],
        attributes: Mapping[str, Any],
        progress: Progress,
    ) -> WrittenManifest:
        """Store local files and then their manifest; what was in the folder is replaced.

        Raises:
            StorageFullError: If there is no room; the folder is then gone.
        """
        total_bytes = sum(path.stat().st_size for path in files.values())
        done_bytes = 0
        self._store.delete_folder(folder)
        entries = {}
        try:
            for name, path in files.items():
                entries[name] = self._put_file(f"{folder}/{name}", path)
                done_bytes += entries[name].size_bytes
                progress(done_bytes, total_bytes)
            return manifests.write_manifest(self._store, folder, entries, attributes)
        except BaseException:
            self._store.delete_folder(folder)
            raise

    def copy(
        self,
        source: str,
        manifest: Manifest,
        target: str,
        attributes: Mapping[str, Any],
        progress: Progress,
    ) -> WrittenManifest:
        """Copy a folder within the store, under a manifest of its own.

        Raises:
            CheckpointCorruptError: If a file is missing or does not match its manifest.
            StorageFullError: If there is no room.
        """
        with self.scratch() as scratch:
            local = self._local(source)
            if local is None:
                files = self.fetch(source, manifest, scratch, manifest.files)
            else:
                files = {name: local / name for name in manifest.files}
            try:
                written = self.put(target, files, attributes, progress)
            except FileNotFoundError as error:
                raise _corrupt(source, Path(error.filename).name, "is missing") from error
        try:
            for name, entry in written.manifest.files.items():
                _check(source, name, manifest, entry)
        except CheckpointCorruptError:
            self._store.delete_folder(target)
            raise
        return written

    def pieces(self, path: str, offset: int) -> Iterator[bytes]:
        """Yield an object of the store from an offset on.

        Raises:
            NotFoundError: If there is none.
        """
        local = self._local(path)
        if local is None:
            content = self._store.read(path)
            for begin in range(offset, len(content), PIECE_BYTES):
                yield content[begin : begin + PIECE_BYTES]
            return
        try:
            file = local.open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotFoundError(f"{path} was deleted", file=path) from error
        with file:
            file.seek(offset)
            while piece := file.read(PIECE_BYTES):
                yield piece

    def url(self, path: str, *, expires_s: float) -> str:
        """Return a signed URL of an object; empty if the store has none."""
        presign = getattr(self._store, "presigned_url", None)
        return "" if presign is None else presign(path, expires_s=expires_s) or ""

    def delete(self, folder: str) -> None:
        """Remove a folder; none is fine."""
        self._store.delete_folder(folder)

    def _pieces_of(self, folder: str, name: str) -> Iterator[bytes]:
        try:
            yield from self.pieces(f"{folder}/{name}", 0)
        except NotFoundError as error:
            raise _corrupt(folder, name, "is missing") from error

    def _put_file(self, path: str, source: Path) -> FileEntry:
        target = self._local(path)
        if target is None:
            content = source.read_bytes()
            self._store.write(path, content)
            return FileEntry(len(content), hashlib.sha256(content).hexdigest())
        # Asks the store for room and a folder, and says in its words if there is none.
        self._store.write(path, b"")
        digest, size_bytes = hashlib.sha256(), 0
        with (
            source.open("rb") as read,
            full_disk_is_typed(target.parent),
            target.open("wb") as written,
        ):
            while piece := read.read(PIECE_BYTES):
                digest.update(piece)
                size_bytes += len(piece)
                written.write(piece)
            written.flush()
            os.fsync(written.fileno())
        return FileEntry(size_bytes, digest.hexdigest())

    def _local(self, path: str) -> Path | None:
        """Return where an object is on this machine, if the store is a folder here."""
        parsed = urlparse(self._store.uri)
        return Path(unquote(parsed.path)) / path if parsed.scheme == "file" else None


def _check(folder: str, name: str, manifest: Manifest, found: FileEntry) -> None:
    if found != manifest.files[name]:
        raise _corrupt(folder, name, "does not match its size and SHA-256 in the manifest")


def _corrupt(folder: str, name: str, problem: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"checkpoint {folder}: {name} {problem}; use another checkpoint", folder=folder, file=name
    )


@contextlib.contextmanager
def full_disk_is_typed(folder: Path) -> Iterator[None]:
    """Raise `StorageFullError` where the disk of a folder is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL_ERRNOS:
            raise
        raise StorageFullError(
            f"the disk of {folder.name} is full; free space, then send the request again"
        ) from error
