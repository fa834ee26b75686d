"""Manifests: what a checkpoint is made of, written last and verified first.

A checkpoint is a folder of files and a `manifest.json` that names each with its size and SHA-256,
and says what the files mean. A folder without a manifest is not a checkpoint. A pod that loads
one verifies every file before it touches a weight. Large files are streamed, never wholly in
memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.whole_files import sha256_of
from tinsmith_runtime.errors import (
    CheckpointCorruptError,
    DataLossError,
    NotFoundError,
    StorageUnavailableError,
    StoreMismatchError,
)
from tinsmith_runtime.storage import ObjectStore
from tinsmith_runtime.storage.file import full_disk_is_typed
from tinsmith_runtime.storage.objects import (
    FileEntry,
    ObjectExistsError,
    Progress,
    ignore_progress,
)

FORMAT = "tinsmith.checkpoint.v1"
MANIFEST_NAME = "manifest.json"
_MAX_MANIFEST_BYTES = 4 * 2**20
_MAX_FILES = 10_000
_FETCHING_PREFIX = ".fetching-"
_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        files: The files by name.
        attributes: What they mean: plain JSON values.
    """

    files: Mapping[str, FileEntry]
    attributes: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of the files."""
        return sum(entry.size_bytes for entry in self.files.values())


@dataclass(frozen=True, slots=True)
class WrittenManifest:
    """A manifest that is on disk."""

    manifest: Manifest
    folder: str
    uri: str
    sha256: str


def write_checkpoint(
    store: ObjectStore,
    folder: str,
    files: Mapping[str, bytes | Path],
    attributes: Mapping[str, Any],
    *,
    progress: Progress = ignore_progress,
) -> WrittenManifest:
    """Write files and then their manifest; what was in the folder is replaced.

    Args:
        store: Where to write.
        folder: The folder, which has no other writer.
        files: By name: content, or a local file to take it from.
        attributes: What the files mean: plain JSON values.
        progress: Told of the bytes of all files.

    Raises:
        StorageFullError: If there is no room; the folder then holds no manifest.
        StorageUnavailableError: If the store does not answer. Calling again goes on with what it
            has of large files.
        ObjectExistsError: If another writer put a manifest meanwhile; it is left alone.
    """
    for name in files:
        if not _is_file_name(name):
            raise ValueError(f"{name!r} cannot be the name of a file of a checkpoint")
    sizes = {name: _size_of(content) for name, content in files.items()}
    total_bytes, done_bytes = sum(sizes.values()), 0
    manifest_path = f"{folder}/{MANIFEST_NAME}"
    # First of all it stops being a checkpoint.
    store.delete(manifest_path)
    try:
        entries = {}
        for name, content in files.items():
            path, before = f"{folder}/{name}", done_bytes
            if isinstance(content, Path):
                beyond = _shifted(progress, before, total_bytes)
                entries[name] = store.write_file(path, content, progress=beyond)
            else:
                store.write(path, content)
                entries[name] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
            done_bytes += sizes[name]
            progress(done_bytes, total_bytes)
        for stored in store.list_folder(folder):
            if stored.path.removeprefix(f"{folder}/") not in entries:
                store.delete(stored.path)
        return write_manifest(store, folder, entries, attributes)
    except (ObjectExistsError, StorageUnavailableError):
        raise
    except Exception:
        with contextlib.suppress(StorageUnavailableError):
            store.delete_folder(folder)
        raise


def read_checkpoint(
    store: ObjectStore, folder: str, *, sha256: str | None = None
) -> tuple[Manifest, dict[str, bytes]]:
    """Return a manifest and its files, all verified.

    Args:
        store: Where the checkpoint is.
        folder: Its folder.
        sha256: What the manifest itself must hash to, where that is known.

    Raises:
        CheckpointCorruptError: If anything is missing, truncated or changed.
    """
    manifest = read_manifest(store, folder, sha256=sha256)
    return manifest, read_files(store, folder, manifest, manifest.files)


def read_files(
    store: ObjectStore, folder: str, manifest: Manifest, names: Iterable[str]
) -> dict[str, bytes]:
    """Return some files of a checkpoint, verified; names that it has not are left out.

    Raises:
        CheckpointCorruptError: If one is missing, truncated or changed.
    """
    return {
        name: b"".join(_verified(store, folder, name, manifest.files[name]))
        for name in names
        if name in manifest.files
    }


def read_manifest(store: ObjectStore, folder: str, *, sha256: str | None = None) -> Manifest:
    """Return the manifest alone; the files are not looked at.

    Raises:
        CheckpointCorruptError: If it is missing, is no manifest, or does not hash to `sha256`.
    """
    try:
        content = store.read(f"{folder}/{MANIFEST_NAME}", max_bytes=_MAX_MANIFEST_BYTES)
    except NotFoundError as error:
        raise _corrupt(folder, MANIFEST_NAME, "is missing") from error
    except DataLossError as error:
        raise _corrupt(folder, MANIFEST_NAME, "is too large for a manifest") from error
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise _corrupt(folder, MANIFEST_NAME, "was changed after it was saved")
    return _decode(folder, content)


def verify_checkpoint(store: ObjectStore, folder: str, *, sha256: str | None = None) -> Manifest:
    """Read all of a checkpoint, keep nothing, and return its manifest.

    Raises:
        CheckpointCorruptError: If anything is missing, truncated or changed.
    """
    manifest = read_manifest(store, folder, sha256=sha256)
    verify_files(store, folder, manifest)
    return manifest


def fetch_files(store: ObjectStore, folder: str, manifest: Manifest, local_folder: Path) -> None:
    """Download the files that a manifest names, verified while they arrive.

    A file gets its name once it is whole and right. After a failure the same call fetches what is
    missing; files that are there and right are kept.

    Raises:
        CheckpointCorruptError: If anything is missing, truncated or changed.
        StorageFullError: If the local disk is full.
    """
    with full_disk_is_typed(local_folder):
        local_folder.mkdir(parents=True, exist_ok=True)
        for name, entry in manifest.files.items():
            target = local_folder / name
            if not _is_there(target, entry):
                temporary = local_folder / f"{_FETCHING_PREFIX}{name}"
                with temporary.open("wb") as file:
                    for chunk in _verified(store, folder, name, entry):
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)


def verify_files(store: ObjectStore, folder: str, manifest: Manifest) -> None:
    """Read all files of a folder against a manifest that need not be there yet; keep nothing.

    Raises:
        CheckpointCorruptError: If anything is missing, truncated or changed.
    """
    for name, entry in manifest.files.items():
        for _ in _verified(store, folder, name, entry):
            pass


def copy_checkpoint(store: ObjectStore, folder: str, target: str) -> Manifest:
    """Copy a checkpoint within a store, its manifest last; return that.

    The files are copied as they are: a pod that loads the copy verifies them.

    Raises:
        CheckpointCorruptError: If the manifest or a file is missing.
        StorageFullError: If there is no room; the target then holds no manifest.
    """
    manifest = read_manifest(store, folder)
    store.delete(f"{target}/{MANIFEST_NAME}")
    for name in (*manifest.files, MANIFEST_NAME):
        try:
            store.copy(f"{folder}/{name}", f"{target}/{name}")
        except NotFoundError as error:
            raise _corrupt(folder, name, "is missing") from error
    return manifest


def write_manifest(
    store: ObjectStore, folder: str, files: Mapping[str, FileEntry], attributes: Mapping[str, Any]
) -> WrittenManifest:
    """Make a folder whose files are all there a checkpoint.

    Raises:
        StorageFullError: If there is no room.
    """
    content = _encode(Manifest(files, attributes))
    store.write_new(f"{folder}/{MANIFEST_NAME}", content)
    return WrittenManifest(
        Manifest(dict(files), dict(attributes)),
        folder,
        manifest_uri(store.uri, folder),
        hashlib.sha256(content).hexdigest(),
    )


def manifest_uri(store_uri: str, folder: str) -> str:
    """Return where the manifest of a folder is, in the store of a URI."""
    return f"{store_uri}/{folder}/{MANIFEST_NAME}"


def find_folder(store: ObjectStore, uri: str, *, sha256: str) -> str:
    """Return the folder in this store of a manifest that may have been named in another place.

    A store that was moved, or that two pods mount at two paths, has other URIs and the same
    content. So a URI that does not begin with the store's own is taken by its tail: the longest
    one whose manifest is here and has the hash.

    Args:
        store: Where to look.
        uri: Of the manifest, as the pod that wrote it named it.
        sha256: What the manifest must hash to; without it a tail could be another checkpoint.

    Raises:
        StoreMismatchError: If it is neither here nor anything with such a tail.
    """
    prefix, suffix = f"{store.uri}/", f"/{MANIFEST_NAME}"
    if uri.startswith(prefix) and uri.endswith(suffix):
        return uri[len(prefix) : -len(suffix)]
    parts = uri.removesuffix(suffix).split("/") if uri.endswith(suffix) else []
    for begin in range(len(parts)):
        folder = "/".join(parts[begin:])
        with contextlib.suppress(CheckpointCorruptError, ValueError):
            read_manifest(store, folder, sha256=sha256)
            return folder
    raise StoreMismatchError(
        f"checkpoint {uri} is not in the store {store.uri} of this pod; give trainer and sampler "
        "the same storage_uri, and restore the whole store with the database",
        manifest_uri=uri,
        storage_uri=store.uri,
    )


def _encode(manifest: Manifest) -> bytes:
    content = {
        "format": FORMAT,
        "attributes": dict(manifest.attributes),
        "files": {
            name: {"size_bytes": entry.size_bytes, "sha256": entry.sha256}
            for name, entry in manifest.files.items()
        },
    }
    return json.dumps(content, indent=1, sort_keys=True).encode()


def _decode(folder: str, content: bytes) -> Manifest:
    try:
        parsed = json.loads(content)
        if parsed["format"] != FORMAT:
            raise ValueError(f"format {parsed['format']!r} is not {FORMAT!r}")
        files = {
            str(name): FileEntry(int(entry["size_bytes"]), str(entry["sha256"]))
            for name, entry in parsed["files"].items()
        }
        attributes = dict(parsed["attributes"])
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise _corrupt(folder, MANIFEST_NAME, f"cannot be read: {error}") from error
    if len(files) > _MAX_FILES:
        raise _corrupt(folder, MANIFEST_NAME, f"names {len(files)} files")
    for name in files:
        if not _is_file_name(name):
            raise _corrupt(folder, MANIFEST_NAME, f"names a file {name!r:.160}")
        if files[name].size_bytes < 0:
            raise _corrupt(folder, MANIFEST_NAME, f"gives {name} a negative size")
    return Manifest(files, attributes)


def _verified(store: ObjectStore, folder: str, name: str, entry: FileEntry) -> Iterator[bytes]:
    """Yield a file; the end is reached only if all of it was what the manifest says."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        for chunk in store.read_chunks(f"{folder}/{name}", max_bytes=entry.size_bytes):
            digest.update(chunk)
            num_bytes += len(chunk)
            yield chunk
    except NotFoundError as error:
        raise _corrupt(folder, name, "is missing") from error
    except DataLossError as error:
        raise _corrupt(folder, name, "is larger than the manifest says, or changes") from error
    if num_bytes != entry.size_bytes:
        raise _corrupt(folder, name, f"has {num_bytes} bytes, the manifest says {entry.size_bytes}")
    if digest.hexdigest() != entry.sha256:
        raise _corrupt(folder, name, "does not match its SHA-256 in the manifest")


def _is_there(local: Path, entry: FileEntry) -> bool:
    """Whether a local file is what a manifest names."""
    return (
        local.is_file()
        and local.stat().st_size == entry.size_bytes
        and sha256_of(local) == entry.sha256
    )


def _shifted(progress: Progress, before_bytes: int, total_bytes: int) -> Progress:
    """Return what counts the bytes of one file as a part of all of them."""
    return lambda done_bytes, _: progress(before_bytes + done_bytes, total_bytes)


def _size_of(content: bytes | Path) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


def _is_file_name(name: str) -> bool:
    return _FILE_NAME_PATTERN.fullmatch(name) is not None and name != MANIFEST_NAME


def _corrupt(folder: str, name: str, problem: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"checkpoint {folder}: {name} {problem}; use another checkpoint", folder=folder, file=name
    )
