"""Uploads: files of an adapter on their way from a client to a checkpoint.

An upload is a folder of this machine: what was promised (`upload.json`) and what arrived so far. It
outlives a restart of the pod. Nothing of it is looked into before it is complete; see `imports`.
One that is idle for minutes gives way once its project wants its room, and for a day goes anyhow.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tinsmith import names
from tinsmith_engine.files.weight_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinsmith_runtime.errors import (
    FileRefusedError,
    InvalidFieldError,
    RequestIdReusedError,
    ResourceExhaustedError,
    UploadIncompleteError,
    UploadNotFoundError,
)
from tinsmith_runtime.ledger import StoredFile
from tinsmith_runtime.storage.file import full_disk_is_typed

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 4 * 2**20
MAX_CONFIG_BYTES = 2**20
IDLE_S = 24 * 3600.0
GIVES_WAY_S = 600.0
"""Time without a piece after which an upload may give way: longer than a client tries one again."""
_MAX_PROJECT_UPLOADS = 8
_PROMISE = "upload.json"
_SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """What a client promised to send.

    Attributes:
        name: Resource name.
        checkpoint: Name of the checkpoint that it is to become.
        files: What it consists of.
        digest: SHA-256 of the request, in hex.
    """

    name: str
    checkpoint: str
    files: tuple[StoredFile, ...]
    labels: Mapping[str, str]
    ttl_s: float | None
    digest: str


@dataclass(frozen=True, slots=True)
class _Place:
    """One upload among those of its project."""

    name: str
    promised_bytes: int
    idle_s: float


class Uploads:
    """All uploads of a trainer. Methods block and belong in a thread, one at a time for an upload.

    Args:
        root: Folder of this machine.
        max_bytes: Limits the weights of one upload.
        max_project_bytes: Limits what the uploads of a project come to once all of them is there.
        clock: Seconds since the epoch.
    """

    def __init__(
        self, root: Path, *, max_bytes: int, max_project_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._max_project_bytes = max_project_bytes
        self._clock = clock

    def create(self, upload: Upload, *, in_use: Collection[str] = ()) -> Upload:
        """Begin an upload, or return the one that the same request began.

        Where the project has no room for it, the longest idle uploads of the project give way.

        Args:
            upload: What is promised.
            in_use: Names of those that wait to be imported: they give way to none.

        Raises:
            FileRefusedError: If it consists of other files than an adapter has, or of large ones.
            RequestIdReusedError: If the request id was used with another body.
            ResourceExhaustedError: If the project has as many as it may have, or as many bytes.
        """
        self._check(upload.files)
        folder = self._folder(upload.name)
        if (folder / _PROMISE).is_file():
            known = self.get(upload.name)
            if known.digest != upload.digest:
                raise RequestIdReusedError(
                    f"upload {upload.name} was begun by a request with another body; draw a new "
                    "UUID for a new request",
                    upload=upload.name,
                )
            return known
        self._make_room(upload, in_use)
        with full_disk_is_typed(folder):
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{_PROMISE}"
            temporary.write_text(json.dumps(asdict(upload)))
            self._touch(temporary)
            temporary.replace(folder / _PROMISE)
        return upload

    def get(self, name: str) -> Upload:
        """Return an upload.

        Raises:
            UploadNotFoundError: If there is none of this name.
        """
        try:
            content = json.loads((self._folder(name) / _PROMISE).read_text())
        except OSError as error:
            raise upload_not_found(name) from error
        files = tuple(StoredFile(**file) for file in content.pop("files"))
        return Upload(**content, files=files)

    def received(self, upload: Upload) -> dict[str, int]:
        """Return how many bytes of each file are there."""
        return {file.name: self._size(upload, file.name) for file in upload.files}

    def write(self, name: str, file_name: str, offset: int, data: bytes) -> Upload:
        """Add a chunk to a file; one that is there already changes nothing.

        Raises:
            UploadNotFoundError: If there is no such upload.
            InvalidFieldError: If it has no such file, or the chunk does not fit into it.
            UploadIncompleteError: If chunks before it are missing.
            StorageFullError: If there is no room.
        """
        upload = self.get(name)
        promised = {file.name: file.size_bytes for file in upload.files}
        if file_name not in promised:
            raise InvalidFieldError("file", f"must be one of {', '.join(sorted(promised))}")
        if not data or len(data) > MAX_PIECE_BYTES:
            raise InvalidFieldError("data", f"must have 1 to {MAX_PIECE_BYTES} bytes")
        if offset < 0 or offset + len(data) > promised[file_name]:
            raise InvalidFieldError(
                "offset_bytes",
                f"is {offset} for {len(data)} bytes of a file of {promised[file_name]} bytes",
            )
        there = self._size(upload, file_name)
        if offset > there:
            raise UploadIncompleteError(
                f"{file_name} of {name} has {there} bytes so far, the piece begins at {offset}; go "
                f"on at {there}",
                received_bytes=there,
            )
        folder = self._folder(name)
        rest = data[there - offset :]
        try:
            if rest:
                with full_disk_is_typed(folder), (folder / file_name).open("ab") as file:
                    file.write(rest)
                    file.flush()
                    os.fsync(file.fileno())
            self._touch(folder / _PROMISE)
        except FileNotFoundError as error:
            # It went meanwhile: what was just written must not stay behind.
            self.remove(name)
            raise upload_not_found(name) from error
        return upload

    def complete(self, name: str) -> tuple[Upload, dict[str, Path]]:
        """Return an upload and where its files are.

        Raises:
            UploadNotFoundError: If there is none of this name.
            UploadIncompleteError: If a file is not complete.
        """
        upload = self.get(name)
        for file in upload.files:
            there = self._size(upload, file.name)
            if there != file.size_bytes:
                raise UploadIncompleteError(
                    f"{file.name} of {name} has {there} of {file.size_bytes} bytes; send the rest",
                    received_bytes=there,
                )
        folder = self._folder(name)
        return upload, {file.name: folder / file.name for file in upload.files}

    def remove(self, name: str) -> None:
        """Remove an upload; none is fine."""
        _remove(self._folder(name))

    def sweep(self) -> None:
        """Remove the uploads that were not written to for a day."""
        for folder in self._root.glob("*/*/*"):
            if self._idle_s(folder) > IDLE_S:
                _remove(folder)

    def _make_room(self, upload: Upload, in_use: Collection[str]) -> None:
        """Let idle uploads of a project give way to one more, as few as will do.

        Raises:
            ResourceExhaustedError: If all that may give way would not do; none has gone then.
        """
        wanted = sum(file.size_bytes for file in upload.files)
        places = sorted(self._places_of(upload), key=lambda place: place.idle_s)
        idle = [
            place for place in places if place.idle_s >= GIVES_WAY_S and place.name not in in_use
        ]
        going: list[_Place] = []
        refusal = self._refusal(places, wanted)
        while refusal and self._refusal(places, wanted):
            if not idle:
                raise refusal
            going.append(idle.pop())
            places.remove(going[-1])
        for place in going:
            logger.info("upload gave way", extra={"upload": place.name, "idle_s": place.idle_s})
            self.remove(place.name)

    def _refusal(self, places: Sequence[_Place], wanted: int) -> ResourceExhaustedError | None:
        """Return why a project may not have one more upload, if it may not."""
        until = f"import one, or wait until one has been idle for {GIVES_WAY_S:.0f} s and gives way"
        if len(places) >= _MAX_PROJECT_UPLOADS:
            return ResourceExhaustedError(
                f"the project has {_MAX_PROJECT_UPLOADS} uploads, which is its limit; {until}",
                limit=_MAX_PROJECT_UPLOADS,
            )
        promised = sum(place.promised_bytes for place in places)
        if places and promised + wanted > self._max_project_bytes:
            return ResourceExhaustedError(
                f"the uploads of the project come to {promised} bytes and this one to {wanted}, "
                f"{self._max_project_bytes} are allowed; {until}",
                limit=self._max_project_bytes,
            )
        return None

    def _places_of(self, upload: Upload) -> Iterator[_Place]:
        """Yield the uploads that there are of the project of one."""
        project = self._folder(upload.name).parents[1]
        for promise in project.glob(f"*/*/{_PROMISE}"):
            # One that was removed just now takes no room.
            with contextlib.suppress(FileNotFoundError):
                content = json.loads(promise.read_text())
                promised = sum(file["size_bytes"] for file in content["files"])
                yield _Place(content["name"], promised, self._idle_s(promise.parent))

    def _check(self, files: Sequence[StoredFile]) -> None:
        limits = {ADAPTER_CONFIG_FILE: MAX_CONFIG_BYTES, ADAPTER_FILE: self._max_bytes}
        if sorted(file.name for file in files) != sorted(limits):
            # Quoted with bounds: the names come from outside.
            found = ", ".join(repr(file.name[:64]) for file in files[:8])
            raise FileRefusedError(
                f"an adapter is {' and '.join(limits)}, not {found or 'nothing'}; pickles are "
                "never taken, convert them to safetensors"
            )
        for file in files:
            if not 0 < file.size_bytes <= limits[file.name]:
                raise FileRefusedError(
                    f"{file.name} has {file.size_bytes} bytes; 1 to {limits[file.name]} are taken",
                    file=file.name,
                )
            if _SHA256_PATTERN.fullmatch(file.sha256) is None:
                raise InvalidFieldError("files.sha256", "must be 64 hexadecimal digits")

    def _size(self, upload: Upload, file_name: str) -> int:
        path = self._folder(upload.name) / file_name
        return path.stat().st_size if path.is_file() else 0

    def _touch(self, promise: Path) -> None:
        # Not the folder: the kernel gives that its own time whenever a file is made in it.
        now_s = self._clock()
        os.utime(promise, (now_s, now_s))

    def _idle_s(self, folder: Path) -> float:
        """Return how long an upload was not written to."""
        try:
            return self._clock() - (folder / _PROMISE).stat().st_mtime
        except FileNotFoundError:
            # Just being begun, cut off at that, or just removed.
            with contextlib.suppress(FileNotFoundError):
                return time.time() - folder.stat().st_mtime
            return 0.0

    def _folder(self, name: str) -> Path:
        # The ids of a name hold no slash and begin with a letter or digit.
        parsed = names.CheckpointUploadName.parse(name)
        return self._root / parsed.project / parsed.run / parsed.upload


def upload_not_found(name: str) -> UploadNotFoundError:
    """Return the error for an upload that does not exist, or belongs to another project."""
    return UploadNotFoundError(
        f"upload {name} does not exist in your project, or was idle and was given up; create "
        "another one",
        upload=name,
    )


def _remove(folder: Path) -> None:
    """Remove the folder of an upload; none is fine."""
    # First what makes it one: a piece that arrives meanwhile then finds that it is gone.
    (folder / _PROMISE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
