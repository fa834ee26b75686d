"""Idle uploads go; those that are being written stay."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from tinsmith_engine.files.weight_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinsmith_runtime.errors import ResourceExhaustedError, UploadNotFoundError
from tinsmith_runtime.ledger import StoredFile
from tinsmith_trainer.checkpoints.uploads import IDLE_S, Upload, Uploads

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


class Clock:
    """Runs ahead of the kernel's."""

    def __init__(self) -> None:
        self.now_s = time.time() + 9 * IDLE_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


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
