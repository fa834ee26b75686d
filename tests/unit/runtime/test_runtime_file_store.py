from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith_runtime import storage
from tinsmith_runtime.errors import ConfigError, DataLossError, NotFoundError, StorageFullError
from tinsmith_runtime.storage.file import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def files(tmp_path: Path) -> list[str]:
    root = tmp_path / "store"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_objects_are_written_replaced_and_deleted(store: FileStore, tmp_path: Path) -> None:
    store.write("a/b/one", b"1")
    store.write("a/b/one", b"22")
    store.write("a/two", b"")
    assert store.read("a/b/one") == b"22"
    assert store.read("a/two", max_bytes=0) == b""
    store.delete_folder("a/b")
    store.delete_folder("a/none")
    assert files(tmp_path) == ["a/two"]


def test_a_folder_is_listed_and_objects_are_deleted_one_by_one(
    store: FileStore, tmp_path: Path
) -> None:
    for path in ("a/one", "a/b/two", "c"):
        store.write(path, b"123")
    (tmp_path / "store" / "a" / ".writing-x").write_bytes(b"half")
    os.utime(tmp_path / "store" / "a" / "one", (50.0, 50.0))
    found = {info.path: info for info in store.list_folder("a")}
    assert sorted(found) == ["a/b/two", "a/one"]
    assert (found["a/one"].size_bytes, found["a/one"].modified_time_s) == (3, 50.0)
    assert store.list_folder("none") == []
    for _ in range(2):
        store.delete("a/one")
    assert [info.path for info in store.list_folder("a")] == ["a/b/two"]
    for call in (store.list_folder, store.delete):
        with pytest.raises(ValueError, match="not a relative object path"):
            call("../up")


@pytest.mark.parametrize("path", ["none", "a", "a/one/deeper"])
def test_what_does_not_exist_is_not_found(store: FileStore, path: str) -> None:
    store.write("a/one", b"1")
    with pytest.raises(NotFoundError, match="does not exist"):
        store.read(path)


def test_an_object_that_is_too_large_is_not_read(store: FileStore) -> None:
    store.write("one", b"123")
    with pytest.raises(DataLossError, match="3 bytes, at most 2"):
        store.read("one", max_bytes=2)


@pytest.mark.parametrize("path", ["", ".", "/etc/passwd", "../up", "a/../../up"])
def test_paths_stay_inside(store: FileStore, path: str) -> None:
    for call in (lambda: store.write(path, b""), lambda: store.read(path)):
        with pytest.raises(ValueError, match="not a relative object path"):
            call()
    with pytest.raises(ValueError, match="not a relative object path"):
        store.delete_folder(path)


def test_a_file_is_synced_before_it_gets_its_name(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    replace, fsync = Path.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda a, b: (events.append("name"), replace(a, b))[1])
    store.write("one", b"1")
    assert events == ["sync", "name", "sync"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "mkstemp", "fsync"])
def test_a_full_disk_is_typed_and_leaves_the_old_object(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    store.write("one", b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    target = {"mkdir": "pathlib.Path.mkdir", "mkstemp": "tempfile.mkstemp", "fsync": "os.fsync"}
    monkeypatch.setattr(target[call], fail)
    with pytest.raises(StorageFullError, match="free space") as failure:
        store.write("one", b"new")
    assert failure.value.retry_after_s is not None
    monkeypatch.undo()
    assert store.read("one") == b"old"
    assert files(tmp_path) == ["one"]


def test_other_failures_are_not_called_a_full_disk(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken"):
        store.write("one", b"new")
    monkeypatch.undo()
    assert files(tmp_path) == []


def test_a_real_limit_on_file_sizes_is_typed(tmp_path: Path) -> None:
    script = """
import pathlib, resource, sys
from tinsmith_runtime.errors import StorageFullError
from tinsmith_runtime.storage.file import FileStore
store = FileStore(pathlib.Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
store.write("one", b"old")
try:
    store.write("one", bytes(10_000))
except StorageFullError:
    store.write("two", b"goes on")
    print("typed")
"""
    child = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "store"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.stdout == "typed\n", child.stderr
    assert files(tmp_path) == ["one", "two"]
    assert (tmp_path / "store" / "one").read_bytes() == b"old"


def test_stores_are_opened_by_uri(tmp_path: Path) -> None:
    store = storage.open(f"file://{tmp_path}/with%20space")
    store.write("one", b"1")
    assert (tmp_path / "with space" / "one").read_bytes() == b"1"
    assert storage.open(store.uri).read("one") == b"1"


@pytest.mark.parametrize("uri", ["", "/data", "gs://bucket", "file://host/data", "file://"])
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="file:///absolute/path"):
        storage.open(uri)


def test_what_a_killed_writer_left_is_no_object_and_is_deleted_once_it_is_old(
    store: FileStore, tmp_path: Path
) -> None:
    store.write("a/one", b"1")
    left_behind = tmp_path / "store" / "a" / ".writing-x"
    left_behind.write_bytes(b"2")
    assert [each.path for each in store.list_folder("")] == ["a/one"]
    assert store.delete_interrupted("", min_age_s=3600) == 0
    os.utime(left_behind, (0, 0))
    assert store.delete_interrupted("a", min_age_s=3600) == 1
    assert files(tmp_path) == ["a/one"]


def test_a_folder_that_can_not_be_used_is_found_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="create the folder"):
        FileStore(tmp_path / "file" / "store").probe()
    FileStore(tmp_path / "new").probe(writable=False)
    assert not (tmp_path / "new").exists()
