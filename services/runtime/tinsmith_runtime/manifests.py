"""Manifests: what a checkpoint is made of, written last and verified first.

A checkpoint is a folder of files and a `manifest.json` that names each with its size and SHA-256,
and says what the files mean. A folder without a manifest is not a checkpoint. Whoever loads one
verifies every file before it touches a weight.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith_runtime.errors import CheckpointCorruptError, DataLossError, NotFoundError
from tinsmith_runtime.storage import ObjectStore

FORMAT = "tinsmith.checkpoint.v1"
MANIFEST_NAME = "manifest.json"
_MAX_MANIFEST_BYTES = 4 * 2**20
_MAX_FILES = 10_000
_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


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
    uri: str
    sha256: str


def write_checkpoint(
    store: ObjectStore, folder: str, files: Mapping[str, bytes], attributes: Mapping[str, Any]
) -> WrittenManifest:
    """Write files and then their manifest; what was in the folder is replaced.

    Raises:
        StorageFullError: If there is no room; the folder then holds no manifest.
    """
    store.delete_folder(folder)
    entries = {}
    try:
        for name, data in files.items():
            store.write(f"{folder}/{name}", data)
            entries[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
        return write_manifest(store, folder, entries, attributes)
    except Exception:
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
    files = {}
    for name, entry in manifest.files.items():
        data = _read(store, folder, name, max_bytes=entry.size_bytes)
        if len(data) != entry.size_bytes:
            raise _corrupt(
                folder, name, f"has {len(data)} bytes, the manifest says {entry.size_bytes}"
            )
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise _corrupt(folder, name, "does not match its SHA-256 in the manifest")
        files[name] = data
    return manifest, files


def read_manifest(store: ObjectStore, folder: str, *, sha256: str | None = None) -> Manifest:
    """Return the manifest alone; the files are not looked at.

    Raises:
        CheckpointCorruptError: If it is missing, is no manifest, or does not hash to `sha256`.
    """
    content = _read(store, folder, MANIFEST_NAME, max_bytes=_MAX_MANIFEST_BYTES)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise _corrupt(folder, MANIFEST_NAME, "was changed after it was saved")
    return _decode(folder, content)


def write_manifest(
    store: ObjectStore, folder: str, files: Mapping[str, FileEntry], attributes: Mapping[str, Any]
) -> WrittenManifest:
    """Make a folder whose files are all there a checkpoint.

    Raises:
        StorageFullError: If there is no room.
    """
    content = _encode(Manifest(files, attributes))
    store.write(f"{folder}/{MANIFEST_NAME}", content)
    return WrittenManifest(
        Manifest(dict(files), dict(attributes)),
        f"{store.uri}/{folder}/{MANIFEST_NAME}",
        hashlib.sha256(content).hexdigest(),
    )


def folder_of(store: ObjectStore, manifest_uri: str) -> str:
    """Return the folder of a manifest URI inside a store.

    Raises:
        CheckpointCorruptError: If the URI lies outside the store.
    """
    prefix, suffix = f"{store.uri}/", f"/{MANIFEST_NAME}"
    if not (manifest_uri.startswith(prefix) and manifest_uri.endswith(suffix)):
        raise CheckpointCorruptError(
            f"checkpoint {manifest_uri} is not in the store {store.uri} of this pod; configure "
            "trainer and sampler with the same storage_uri",
            manifest_uri=manifest_uri,
        )
    return manifest_uri[len(prefix) : -len(suffix)]


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
        raise _corrupt(folder, MANIFEST_NAME, f"can not be read: {error}") from error
    if len(files) > _MAX_FILES:
        raise _corrupt(folder, MANIFEST_NAME, f"names {len(files)} files")
    for name in files:
        if _FILE_NAME_PATTERN.fullmatch(name) is None or name == MANIFEST_NAME:
            raise _corrupt(folder, MANIFEST_NAME, f"names a file {name!r:.160}")
    return Manifest(files, attributes)


def _read(store: ObjectStore, folder: str, name: str, *, max_bytes: int) -> bytes:
    try:
        return store.read(f"{folder}/{name}", max_bytes=max_bytes)
    except NotFoundError as error:
        raise _corrupt(folder, name, "is missing") from error
    except DataLossError as error:
        raise _corrupt(folder, name, "is larger than the manifest says") from error


def _corrupt(folder: str, name: str, problem: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"checkpoint {folder}: {name} {problem}; use another checkpoint", folder=folder, file=name
    )
