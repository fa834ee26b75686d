"""Files of checkpoints to and from this machine: resumed where they stopped, verified by hash.

Coroutines that run in the background loop; what reads or hashes a whole file runs in a thread.
"""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tinsmith.addresses import is_near
from tinsmith.checkpoints import tasks
from tinsmith.checkpoints.tasks import Progress
from tinsmith.errors import (
    ConfigurationError,
    DataLossError,
    InternalError,
    TinsmithError,
    UnavailableError,
)
from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_optional_duration
from tinsmith.rpc.transport import Backoff, Endpoint
from tinsmith.types import Checkpoint
from tinsmith.v1 import checkpoint_pb2
from tinsmith.whole_files import sha256_of

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_PIECE_BYTES = 2**20
_UPLOAD_PIECE_BYTES = 4 * 2**20
_URL_TIMEOUT_S = 60.0
_PART_SUFFIX = ".part"


async def download_checkpoint(
    core: ClientCore, name: str, folder: Path, *, progress: Progress | None
) -> list[Path]:
    """Fetch the files of a checkpoint or export into a folder, and return their paths.

    Raises:
        DataLossError: If a file is not what the server says; it is removed.
    """
    checkpoint = name.partition("/exports/")[0]
    endpoint = await tasks.endpoint_of(core, checkpoint)
    request = checkpoint_pb2.CreateCheckpointDownloadRequest(name=name)
    download = await core.transport.call(
        endpoint, lambda c: c.checkpoint.CreateCheckpointDownload, request
    )
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(source.file.size_bytes for source in download.sources)
    meter = _Meter(progress, total)
    paths = []
    for source in download.sources:
        path = folder / _checked_name(source.file.file)
        if not await asyncio.to_thread(_is_file, path, source.file):
            await _fetch(core, endpoint, name, source, path, meter)
        else:
            meter.add(source.file.size_bytes)
        paths.append(path)
    return paths


async def import_adapter(
    core: ClientCore,
    folder: Path,
    run: str,
    name: str,
    *,
    labels: Mapping[str, str],
    ttl_seconds: float | None,
    progress: Progress | None,
) -> Checkpoint:
    """Send a PEFT adapter and make it a checkpoint of a run."""
    for file_name in ADAPTER_FILES:
        if not (folder / file_name).is_file():
            raise ConfigurationError(
                f"{folder} holds no {file_name}",
                remedy="save the adapter with PEFT and safe_serialization=True",
            )
    parent = await core.get_run(core.run_name(run))
    endpoint = core.trainer_endpoint(parent)
    files = [await asyncio.to_thread(_describe, folder / file_name) for file_name in ADAPTER_FILES]
    upload = await core.transport.call(
        endpoint,
        lambda c: c.checkpoint.CreateCheckpointUpload,
        checkpoint_pb2.CreateCheckpointUploadRequest(
            parent=parent.name,
            request_id=str(uuid.uuid4()),
            checkpoint_id=name,
            files=files,
            labels=dict(labels),
            ttl=encode_optional_duration(ttl_seconds),
        ),
    )
    meter = _Meter(progress, sum(file.size_bytes for file in files))
    for state in upload.files:
        await _send(core, endpoint, upload.name, state, folder / state.file.file, meter)
    request = checkpoint_pb2.ImportCheckpointRequest(
        upload=upload.name, request_id=str(uuid.uuid4())
    )
    operation = await core.transport.call(
        endpoint, lambda c: c.checkpoint.ImportCheckpoint, request
    )
    message = await tasks.wait_task(core, endpoint, operation, checkpoint_pb2.Checkpoint(), None)
    return codec.decode_checkpoint(message)


class _Meter:
    """Adds up bytes over files."""

    def __init__(self, progress: Progress | None, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._done_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


async def _fetch(
    core: ClientCore,
    endpoint: Endpoint,
    name: str,
    source: checkpoint_pb2.CheckpointDownload.Source,
    path: Path,
    meter: _Meter,
) -> None:
    """Fetch one file, going on where an earlier call stopped."""
    part = path.with_name(path.name + _PART_SUFFIX)
    if part.is_file() and part.stat().st_size > source.file.size_bytes:
        part.unlink()
    backoff = Backoff(core.settings.retry)
    with part.open("ab") as file:
        meter.add(file.tell())
        while file.tell() < source.file.size_bytes:
            before = file.tell()
            try:
                if source.url:
                    await asyncio.to_thread(_read_url, source, file, meter)
                else:
                    await _read_stream(core, endpoint, name, source, file, meter)
            except TinsmithError as error:
                if file.tell() > before:
                    # It moves: patience begins anew.
                    backoff = Backoff(core.settings.retry)
                delay_s = backoff.delay_s(error, time.monotonic())
                if delay_s is None:
                    raise backoff.gave_up(error, time.monotonic()) from error.__cause__
                await asyncio.sleep(delay_s)
                await endpoint.relocate()
    if not await asyncio.to_thread(_is_file, part, source.file):
        part.unlink()
        raise DataLossError(
            f"{source.file.file} of {name} does not have the SHA-256 that the server says",
            remedy="download it again; if it happens again, use another checkpoint",
        )
    part.replace(path)


async def _read_stream(
    core: ClientCore,
    endpoint: Endpoint,
    name: str,
    source: checkpoint_pb2.CheckpointDownload.Source,
    file: BinaryIO,
    meter: _Meter,
) -> None:
    request = checkpoint_pb2.DownloadCheckpointFileRequest(
        name=name, token=source.token, offset_bytes=file.tell()
    )
    pieces = core.transport.stream_once(
        endpoint, lambda c: c.checkpoint.DownloadCheckpointFile, request
    )
    async for piece in pieces:
        if piece.offset_bytes != file.tell():
            raise InternalError(f"the server sent {piece.offset_bytes} after {file.tell()} bytes")
        file.write(piece.data)
        meter.add(len(piece.data))
    if file.tell() < source.file.size_bytes:
        raise UnavailableError(f"the download of {source.file.file} ended early", retry_after_s=0.0)


def _read_url(
    source: checkpoint_pb2.CheckpointDownload.Source, file: BinaryIO, meter: _Meter
) -> None:
    if not source.url.startswith(("https://", "http://")):
        raise InternalError(f"the server names a URL that is none: {source.url[:64]}")
    request = urllib.request.Request(source.url, headers={"Range": f"bytes={file.tell()}-"})
    try:
        with opener_for(source.url).open(request, timeout=_URL_TIMEOUT_S) as response:
            if file.tell() and response.status != 206:
                # The store sends all of it, whatever is asked for.
                meter.add(-file.tell())
                file.truncate(0)
            while piece := response.read(_PIECE_BYTES):
                file.write(piece)
                meter.add(len(piece))
    except (urllib.error.URLError, OSError) as error:
        raise UnavailableError(
            f"the download of {source.file.file} was cut off: {error}",
            retry_after_s=0.0,
        ) from error


def opener_for(url: str) -> urllib.request.OpenerDirector:
    """Return what opens a URL: past the proxy of the machine if the store is near."""
    if is_near(url):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


async def _send(
    core: ClientCore,
    endpoint: Endpoint,
    upload: str,
    state: checkpoint_pb2.CheckpointUpload.Progress,
    path: Path,
    meter: _Meter,
) -> None:
    with path.open("rb") as file:
        file.seek(state.received_bytes)
        meter.add(state.received_bytes)
        while piece := await asyncio.to_thread(file.read, _UPLOAD_PIECE_BYTES):
            request = checkpoint_pb2.UploadCheckpointFileRequest(
                upload=upload,
                file=state.file.file,
                offset_bytes=file.tell() - len(piece),
                data=piece,
            )
            await core.transport.call(
                endpoint, lambda c: c.checkpoint.UploadCheckpointFile, request
            )
            meter.add(len(piece))


def _describe(path: Path) -> checkpoint_pb2.CheckpointFile:
    return checkpoint_pb2.CheckpointFile(
        file=path.name, size_bytes=path.stat().st_size, sha256=sha256_of(path)
    )


def _is_file(path: Path, wanted: checkpoint_pb2.CheckpointFile) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == wanted.size_bytes
        and sha256_of(path) == wanted.sha256
    )


def _checked_name(name: str) -> str:
    """Return a file name that stays in its folder, whatever the server says."""
    if not name or name.startswith(".") or any(mark in name for mark in ("/", "\\", "\0")):
        raise InternalError(f"the server names a file {name[:64]!r}")
    return name
