from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinsmith_runtime.errors import (
    CheckpointCorruptError,
    StorageFullError,
    StoreMismatchError,
)
from tinsmith_runtime.storage.checkpoint_manifests import (
    MANIFEST_NAME,
    WrittenManifest,
    find_folder,
    read_checkpoint,
    write_checkpoint,
)
from tinsmith_runtime.storage.file import FileStore

FILES = {"weights.safetensors": b"w" * 100, "config.json": b"{}"}
ATTRIBUTES = {"version": 3, "kind": "training"}
FOLDER = "projects/p/trainingRuns/r/checkpoints/training/a"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


@pytest.fixture
def written(store: FileStore) -> WrittenManifest:
    return write_checkpoint(store, FOLDER, FILES, ATTRIBUTES)


def test_a_checkpoint_reads_back(store: FileStore, written: WrittenManifest) -> None:
    manifest, files = read_checkpoint(store, FOLDER, sha256=written.sha256)
    assert files == FILES
    assert manifest == written.manifest
    assert manifest.attributes == ATTRIBUTES
    assert manifest.size_bytes == 102
    assert find_folder(store, written.uri, sha256=written.sha256) == FOLDER


def test_equal_content_has_an_equal_manifest(store: FileStore, written: WrittenManifest) -> None:
    again = write_checkpoint(store, FOLDER + "2", dict(reversed(FILES.items())), ATTRIBUTES)
    assert again.sha256 == written.sha256


def test_writing_again_replaces_everything(store: FileStore, written: WrittenManifest) -> None:
    write_checkpoint(store, FOLDER, {"other": b"1"}, {})
    assert read_checkpoint(store, FOLDER)[1] == {"other": b"1"}
    with pytest.raises(CheckpointCorruptError, match="changed"):
        read_checkpoint(store, FOLDER, sha256=written.sha256)


def test_the_manifest_comes_last_and_a_full_disk_leaves_none(tmp_path: Path) -> None:
    class FillingStore(FileStore):
        def write_new(self, path: str, data: bytes) -> None:
            assert path.endswith(MANIFEST_NAME)
            assert (tmp_path / FOLDER / "config.json").exists()
            raise StorageFullError("full")

    with pytest.raises(StorageFullError):
        write_checkpoint(FillingStore(tmp_path), FOLDER, FILES, ATTRIBUTES)
    assert not (tmp_path / FOLDER).exists()


def test_a_file_that_is_not_in_the_manifest_is_never_read(
    store: FileStore, written: WrittenManifest
) -> None:
    store.write(f"{FOLDER}/extra.bin", b"x")
    assert read_checkpoint(store, FOLDER, sha256=written.sha256)[1] == FILES


# Damage.


def truncated(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes(b"w" * 99)


def grown(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes(b"w" * 101)


def changed(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes(b"w" * 99 + b"x")


def removed(folder: Path) -> None:
    (folder / "config.json").unlink()


def turned_into_a_folder(folder: Path) -> None:
    removed(folder)
    (folder / "config.json").mkdir()


def no_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, "99 bytes, the manifest says 100"),
        (grown, "larger than the manifest says"),
        (changed, "SHA-256"),
        (removed, "config.json is missing"),
        (turned_into_a_folder, "config.json"),
        (no_manifest, "manifest.json is missing"),
    ],
)
def test_damaged_files_are_found(
    store: FileStore,
    tmp_path: Path,
    written: WrittenManifest,
    damage: Callable[[Path], None],
    says: str,
) -> None:
    damage(tmp_path / FOLDER)
    with pytest.raises(CheckpointCorruptError, match=says) as failure:
        read_checkpoint(store, FOLDER)
    assert failure.value.metadata["folder"] == FOLDER
    assert "another checkpoint" in failure.value.message


def entry(size_bytes: Any = 1, sha256: Any = "ab") -> dict[str, Any]:
    return {"size_bytes": size_bytes, "sha256": sha256}


def manifest(**changes: Any) -> bytes:
    content = {"format": "tinsmith.checkpoint.v1", "attributes": {}, "files": {}} | changes
    return json.dumps(content).encode()


def naming(*names: str) -> bytes:
    return manifest(files={name: entry() for name in names})


HOSTILE = {
    "empty": b"",
    "not-json": b"{",
    "not-utf8": b"\xff\xfe{",
    "a-list": b"[]",
    "null": b"null",
    "a-number": b"7",
    "nothing": b"{}",
    "deep": b"[" * 200_000,
    "long-number": manifest(files={"a": entry()}).replace(b": 1,", b": " + b"9" * 5000 + b","),
    "other-format": manifest(format="tinsmith.checkpoint.v2"),
    "no-format": b'{"files": {}, "attributes": {}}',
    "files-list": manifest(files=["a"]),
    "files-null": manifest(files=None),
    "file-null": manifest(files={"a": None}),
    "file-number": manifest(files={"a": 1}),
    "no-size": manifest(files={"a": {"sha256": "ab"}}),
    "size-word": manifest(files={"a": entry(size_bytes="many")}),
    "size-negative": manifest(files={"a": entry(size_bytes=-1)}),
    "size-infinite": manifest(files={"a": entry(size_bytes=float("inf"))}),
    "size-nan": manifest(files={"a": entry(size_bytes=float("nan"))}),
    "size-list": manifest(files={"a": entry(size_bytes=[1])}),
    "attributes-number": manifest(attributes=3),
    "attributes-word": manifest(attributes="version"),
    "parent": naming("../../../secret"),
    "absolute": naming("/etc/passwd"),
    "nested": naming("a/b"),
    "dot": naming("."),
    "dots": naming(".."),
    "hidden": naming(".bashrc"),
    "unnamed": naming(""),
    "itself": naming(MANIFEST_NAME),
    "null-byte": naming("a\0b"),
    "newline": naming("a\n"),
    "surrogate": naming("\ud800"),
    "long-name": naming("a" * 300),
    "extra": naming("not-there"),
    "too-many": naming(*(f"f{index}" for index in range(10_001))),
    "huge": b" " * (4 * 2**20 + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_corrupt_and_nothing_else(
    store: FileStore, tmp_path: Path, name: str
) -> None:
    (tmp_path / "secret").write_text("s")
    store.write(f"{FOLDER}/{MANIFEST_NAME}", HOSTILE[name])
    with pytest.raises(CheckpointCorruptError):
        read_checkpoint(store, FOLDER)


@pytest.mark.parametrize(
    "uri",
    ["", "file:///elsewhere/a/manifest.json", "{store}/a", "{store}/a/manifest.json.bak", "s3://b"],
)
def test_a_manifest_of_another_store_is_refused(
    store: FileStore, written: WrittenManifest, uri: str
) -> None:
    with pytest.raises(StoreMismatchError, match="storage_uri"):
        find_folder(store, uri.format(store=store.uri), sha256=written.sha256)


@pytest.mark.parametrize(
    "place", ["file:///backups/monday", "file:///projects/p/store", "s3://bucket/prefix"]
)
def test_a_manifest_is_found_by_its_tail_where_the_store_was_moved(
    store: FileStore, written: WrittenManifest, place: str
) -> None:
    uri = f"{place}/{FOLDER}/{MANIFEST_NAME}"
    assert find_folder(store, uri, sha256=written.sha256) == FOLDER


def test_a_tail_with_another_content_is_another_checkpoint(
    store: FileStore, written: WrittenManifest
) -> None:
    uri = f"file:///elsewhere/{FOLDER}/{MANIFEST_NAME}"
    with pytest.raises(StoreMismatchError, match="restore the whole store"):
        find_folder(store, uri, sha256="0" * 64)
    assert find_folder(store, written.uri, sha256="0" * 64) == FOLDER  # reading it says: changed
