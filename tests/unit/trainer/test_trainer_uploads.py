"""Idle uploads go, or give way to another; those that are being written stay."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from tests.support.clock import Clock

from tinsmith_engine.files.weight_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinsmith_runtime.errors import ResourceExhaustedError, UploadNotFoundError
from tinsmith_runtime.ledger import StoredFile
from tinsmith_trainer.checkpoints.uploads import GIVES_WAY_S, IDLE_S, Upload, Uploads

RUN = "projects/p/trainingRuns/r"
UPLOAD = Upload(
    name=f"{RUN}/checkpointUploads/u",
    checkpoint=f"{RUN}/checkpoints/c",
    files=tuple(
        StoredFile(name=name, size_bytes=2, sha256="0" * 64)
        for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE)
    ),
    labels={},
    ttl_s=None,
    digest="d",
)


@pytest.fixture
def clock() -> Clock:
    # Ahead of the kernel's.
    return Clock(time.time() + 9 * IDLE_S)


@pytest.fixture
def uploads(tmp_path: Path, clock: Clock) -> Uploads:
    return Uploads(tmp_path / "uploads", max_bytes=100, max_project_bytes=100, clock=clock)


def test_an_upload_goes_a_day_after_the_last_write(uploads: Uploads, clock: Clock) -> None:
    uploads.create(UPLOAD)
    clock.now_s += IDLE_S - 1
    uploads.write(UPLOAD.name, ADAPTER_FILE, 0, b"x")
    clock.now_s += IDLE_S - 1
    uploads.sweep()
    assert uploads.received(uploads.get(UPLOAD.name)) == {ADAPTER_CONFIG_FILE: 0, ADAPTER_FILE: 1}
    clock.now_s += 2
    uploads.sweep()
    with pytest.raises(UploadNotFoundError):
        uploads.get(UPLOAD.name)


def test_a_sweep_leaves_alone_what_is_being_written(uploads: Uploads, tmp_path: Path) -> None:
    # As a sweep in another thread finds them: a folder without its promise, and a file of which
    # was not noted yet that it was made.
    begun = tmp_path / "uploads" / "p" / "r" / "begun"
    begun.mkdir(parents=True)
    uploads.sweep()
    assert begun.exists()
    uploads.create(UPLOAD)
    [promise] = (tmp_path / "uploads").glob("*/*/*/upload.json")
    (promise.parent / ADAPTER_FILE).write_bytes(b"x")
    uploads.sweep()
    assert uploads.received(uploads.get(UPLOAD.name))[ADAPTER_FILE] == 1


def upload(project: str, upload_id: str, size_bytes: int) -> Upload:
    files = (
        StoredFile(name=ADAPTER_CONFIG_FILE, size_bytes=1, sha256="0" * 64),
        StoredFile(name=ADAPTER_FILE, size_bytes=size_bytes, sha256="0" * 64),
    )
    name = f"projects/{project}/trainingRuns/r/checkpointUploads/{upload_id}"
    return dataclasses.replace(UPLOAD, name=name, files=files)


def test_the_bytes_of_a_project_are_bounded_before_any_arrives(
    uploads: Uploads, tmp_path: Path
) -> None:
    uploads.create(upload("p", "u1", 59))
    with pytest.raises(ResourceExhaustedError, match=r"60 bytes.* import one") as caught:
        uploads.create(upload("p", "u2", 40))
    assert caught.value.metadata["limit"] == "100"
    assert len(list((tmp_path / "uploads").glob("*/*/*"))) == 1
    uploads.create(upload("p", "u3", 39))
    # A repeat of the request that began one, and another project.
    uploads.create(upload("p", "u1", 59))
    uploads.create(upload("q", "u1", 99))
    uploads.remove(upload("p", "u1", 59).name)
    uploads.create(upload("p", "u2", 40))


def begin_eight(uploads: Uploads, clock: Clock, size_bytes: int = 1) -> list[Upload]:
    """Begin as many as a project may have, a second between them, each with a byte."""
    begun = [upload("p", f"u{number}", size_bytes) for number in range(8)]
    for one in begun:
        uploads.create(one)
        uploads.write(one.name, ADAPTER_FILE, 0, b"x")
        clock.now_s += 1
    return begun


def test_the_longest_idle_upload_gives_way_to_a_ninth(
    uploads: Uploads, clock: Clock, tmp_path: Path
) -> None:
    first, second, *others = begin_eight(uploads, clock)
    uploads.create(upload("q", "u1", 1))
    # Of the first one only its client knows that it goes on.
    uploads.write(first.name, ADAPTER_CONFIG_FILE, 0, b"x")
    # The second one was written to seven seconds ago.
    clock.now_s += GIVES_WAY_S - 7.5
    with pytest.raises(ResourceExhaustedError, match="8 uploads"):
        uploads.create(upload("p", "ninth", 1))
    clock.now_s += 1
    ninth = uploads.create(upload("p", "ninth", 1))
    assert not (tmp_path / "uploads" / "p" / "r" / "u1").exists()
    for one in (first, *others, ninth, upload("q", "u1", 1)):
        assert uploads.get(one.name).name == one.name
    with pytest.raises(UploadNotFoundError, match="was given up"):
        uploads.write(second.name, ADAPTER_FILE, 1, b"x")
    with pytest.raises(UploadNotFoundError, match="was given up"):
        uploads.complete(second.name)
    # Its place is another's, which is not idle: the next one waits for the next idle one.
    with pytest.raises(ResourceExhaustedError, match="8 uploads"):
        uploads.create(second)


def test_a_client_whose_upload_gave_way_begins_it_anew(uploads: Uploads, clock: Clock) -> None:
    first, *_ = begin_eight(uploads, clock)
    clock.now_s += GIVES_WAY_S
    uploads.create(upload("p", "ninth", 1))
    # The same request: it takes the place of the next idle one, and no byte of it is there.
    again = uploads.create(first)
    assert uploads.received(again) == {ADAPTER_CONFIG_FILE: 0, ADAPTER_FILE: 0}


def test_an_upload_that_is_imported_gives_way_to_none(uploads: Uploads, clock: Clock) -> None:
    first, second, *_ = begin_eight(uploads, clock)
    clock.now_s += GIVES_WAY_S
    uploads.create(upload("p", "ninth", 1), in_use={first.name})
    assert uploads.get(first.name).name == first.name
    with pytest.raises(UploadNotFoundError):
        uploads.get(second.name)


def test_idle_uploads_give_way_to_the_bytes_of_another_if_that_helps(
    uploads: Uploads, clock: Clock
) -> None:
    begun = [upload("p", f"u{number}", 29) for number in range(3)]
    for one in begun:
        uploads.create(one)
        clock.now_s += 1
    clock.now_s += GIVES_WAY_S
    uploads.write(begun[2].name, ADAPTER_FILE, 0, b"x")
    # The idle ones would not do: they stay.
    with pytest.raises(ResourceExhaustedError, match="90 bytes"):
        uploads.create(upload("p", "large", 79))
    assert uploads.get(begun[0].name).name == begun[0].name
    uploads.create(upload("p", "small", 39))
    assert uploads.get(begun[1].name).name == begun[1].name
    with pytest.raises(UploadNotFoundError):
        uploads.get(begun[0].name)


def test_a_piece_that_arrives_while_its_upload_goes_leaves_nothing(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads.create(UPLOAD)
    folder = tmp_path / "uploads" / "p" / "r" / "u"

    def go(_: int) -> None:
        # As another thread does between two lines of the write.
        (folder / "upload.json").unlink()

    monkeypatch.setattr("os.fsync", go)
    with pytest.raises(UploadNotFoundError):
        uploads.write(UPLOAD.name, ADAPTER_FILE, 0, b"x")
    assert not folder.exists()
