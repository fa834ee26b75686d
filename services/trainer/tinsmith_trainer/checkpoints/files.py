"""Files of checkpoints and exports: fetched, put, copied and read in chunks, always verified.

The one module of the trainer that moves large files: nothing here holds a whole file in memory.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tinsmith_runtime.errors import CheckpointCorruptError, NotFoundError
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_runtime.storage.checkpoint_manifests import Manifest, WrittenManifest
from tinsmith_runtime.storage.objects import Progress


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
        """Whether a task or a download reads a folder."""
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
        return checkpoint_manifests.read_manifest(self._store, folder, sha256=sha256)

    def fetch(
        self, folder: str, manifest: Manifest, target: Path, names: Collection[str]
    ) -> dict[str, Path]:
        """Return local copies of some files of a folder, verified.

        Raises:
            CheckpointCorruptError: If a file is missing or does not match the manifest.
        """
        wanted = {name: manifest.files[name] for name in names}
        checkpoint_manifests.fetch_files(self._store, folder, Manifest(wanted, {}), target)
        return {name: target / name for name in names}

    def put(
        self,
        folder: str,
        files: Mapping[str, Path],
        attributes: Mapping[str, Any],
        progress: Progress,
    ) -> WrittenManifest:
        """Store local files and then their manifest; what was in the folder is replaced.

        Raises:
            StorageFullError: If there is no room; the folder then holds no manifest.
        """
        return checkpoint_manifests.write_checkpoint(
            self._store, folder, files, attributes, progress=progress
        )

    def copy(
        self,
        source: str,
        manifest: Manifest,
        target: str,
        attributes: Mapping[str, Any],
        progress: Progress,
    ) -> WrittenManifest:
        """Copy a folder within the store, under a manifest of its own; the copy is verified.

        The target is a folder that was never used. What fails leaves its files there.

        Raises:
            CheckpointCorruptError: If a file is missing or does not match its manifest.
            StorageFullError: If there is no room.
        """
        done_bytes = 0
        for name, entry in manifest.files.items():
            self._copy_file(source, target, name)
            done_bytes += entry.size_bytes
            progress(done_bytes, manifest.size_bytes)
        checkpoint_manifests.verify_files(self._store, target, manifest)
        return checkpoint_manifests.write_manifest(self._store, target, manifest.files, attributes)

    def chunks(self, path: str, offset: int) -> Iterator[bytes]:
        """Yield an object of the store from an offset on.

        Raises:
            NotFoundError: If there is none.
        """
        return self._store.read_chunks(path, offset=offset)

    def url(self, path: str, *, expires_s: float) -> str:
        """Return a signed URL of an object; empty if the store has none."""
        return self._store.presigned_url(path, expires_s=expires_s) or ""

    def subfolders(self, parent: str) -> list[str]:
        """Return the folders right below another one that hold files."""
        found = {info.path.removeprefix(f"{parent}/") for info in self._store.list_folder(parent)}
        return sorted({f"{parent}/{path.partition('/')[0]}" for path in found if "/" in path})

    def delete(self, folder: str) -> None:
        """Remove a folder; none is fine."""
        self._store.delete_folder(folder)

    def _copy_file(self, source: str, target: str, name: str) -> None:
        try:
            self._store.copy(f"{source}/{name}", f"{target}/{name}")
        except NotFoundError as error:
            raise CheckpointCorruptError(
                f"checkpoint {source}: {name} is missing; use another checkpoint",
                folder=source,
                file=name,
            ) from error
