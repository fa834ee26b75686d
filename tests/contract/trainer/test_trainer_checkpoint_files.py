"""Downloads from any offset by a token, and uploads in pieces that are refused by name."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load, save
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    error_of,
    new_id,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.checkpoint_calls import (
    SETTINGS,
    WEIGHTS,
    folder_of,
    reason,
    ttl,
)

from tinsmith.v1 import checkpoint_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import TinsmithError
from tinsmith_trainer.checkpoints.transfers import CheckpointWork, Made
from tinsmith_trainer.checkpoints.uploads import GIVES_WAY_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    settings = {"max_import_bytes": 2**20, "checkpoint_sweep_interval_s": 3600.0}
    async with running_trainer(data_dir, engine_host, **settings) as rig:
        yield rig


async def read_file(run: RunClient, name: str, token: str, offset: int = 0) -> bytes:
    request = checkpoint_pb2.DownloadCheckpointFileRequest(
        name=name, token=token, offset_bytes=offset
    )
    content = b""
    call = run.rig.stub.DownloadCheckpointFile(request, metadata=run.metadata, timeout=TIMEOUT_S)
    async for piece in call:
        assert piece.offset_bytes == offset + len(content)
        content += piece.data
    return content


async def sources(run: RunClient, name: str) -> dict[str, Any]:
    request = checkpoint_pb2.CreateCheckpointDownloadRequest(name=name)
    answer = await run.call("CreateCheckpointDownload", request)
    assert answer.expire_time.seconds > 0
    return {source.file.file: source for source in answer.sources}


async def test_files_are_streamed_from_any_offset(rig: TrainerRig) -> None:
    run = await rig.new_run("download", rank=64)
    saved = await run.saved("a")
    found = await sources(run, saved.name)
    assert set(found) == {SETTINGS, WEIGHTS, "optimizer.safetensors"}
    for name, source in found.items():
        wanted = (folder_of(saved) / name).read_bytes()
        assert (source.url, source.file.size_bytes) == ("", len(wanted))
        assert source.file.sha256 == hashlib.sha256(wanted).hexdigest()
        for offset in (0, 1, len(wanted) // 2, len(wanted)):
            assert await read_file(run, saved.name, source.token, offset) == wanted[offset:]
        for offset in (-1, len(wanted) + 1):
            error = await refusal(_whole(run, saved.name, source.token, offset))
            assert error.metadata["field"] == "offset_bytes"


async def _whole(run: RunClient, *args: Any) -> bytes:
    return await read_file(run, *args)


async def test_a_token_is_good_for_one_file_of_one_checkpoint_for_an_hour(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run("tokens")
    saved = await run.saved("a")
    other = await run.saved("b")
    token = (await sources(run, saved.name))[WEIGHTS].token
    body, _, signature = token.partition(".")
    forged = [
        "",
        ".",
        body,
        f"{body}.",
        f"{body}x.{signature}",
        f"{body}.{signature[:-1]}{'1' if signature.endswith('0') else '0'}",
        f"{body}.\u00e9",
        "x" * 10_000,
    ]
    for wrong in forged:
        error = await refusal(_whole(run, saved.name, wrong))
        assert error.reason == "DOWNLOAD_TOKEN_INVALID", wrong
    assert (await refusal(_whole(run, other.name, token))).reason == "DOWNLOAD_TOKEN_INVALID"
    rig.passed_s += 3601
    assert (await refusal(_whole(run, saved.name, token))).reason == "DOWNLOAD_TOKEN_INVALID"
    token = (await sources(run, saved.name))[WEIGHTS].token
    await run.call("DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest(name=saved.name))
    assert (await refusal(_whole(run, saved.name, token))).code.name == "NOT_FOUND"
    missing = sources(run, f"{other.name}/exports/merged")
    assert (await refusal(missing)).reason == "RESOURCE_NOT_FOUND"


def described(content: bytes, name: str, **changes: Any) -> checkpoint_pb2.CheckpointFile:
    fields = {
        "file": name,
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        **changes,
    }
    return checkpoint_pb2.CheckpointFile(**fields)


async def begin_upload(run: RunClient, files: list[Any], **fields: Any) -> Any:
    fields = {"request_id": new_id(), "checkpoint_id": "imported", **fields}
    request = checkpoint_pb2.CreateCheckpointUploadRequest(parent=run.name, files=files, **fields)
    return await run.call("CreateCheckpointUpload", request)


async def send(run: RunClient, upload: Any, file: str, offset: int, data: bytes) -> Any:
    request = checkpoint_pb2.UploadCheckpointFileRequest(
        upload=upload.name, file=file, offset_bytes=offset, data=data
    )
    return await run.call("UploadCheckpointFile", request)


async def finish(run: RunClient, upload: Any) -> Any:
    request = checkpoint_pb2.ImportCheckpointRequest(upload=upload.name, request_id=new_id())
    return await run.wait(await run.call("ImportCheckpoint", request))


async def imported(run: RunClient, files: dict[str, bytes], **fields: Any) -> Any:
    """Upload and import files; return the operation at its end."""
    upload = await begin_upload(run, [described(c, n) for n, c in files.items()], **fields)
    for name, content in files.items():
        await send(run, upload, name, 0, content)
    return await finish(run, upload)


def files_of(checkpoint: Any) -> dict[str, bytes]:
    return {name: (folder_of(checkpoint) / name).read_bytes() for name in (SETTINGS, WEIGHTS)}


async def test_an_upload_is_continued_where_it_stopped(rig: TrainerRig) -> None:
    run = await rig.new_run("upload")
    await run.step()
    saved = await run.saved("a")
    files = files_of(saved)
    request_id = new_id()
    wanted = [described(content, name) for name, content in files.items()]
    upload = await begin_upload(run, wanted, request_id=request_id, ttl=ttl(600))
    assert upload.checkpoint == f"{run.name}/checkpoints/imported"
    weights = files[WEIGHTS]
    await send(run, upload, WEIGHTS, 0, weights[:1000])
    error = await refusal(send(run, upload, WEIGHTS, 2000, b"x"))
    assert (error.reason, error.metadata["received_bytes"]) == ("UPLOAD_INCOMPLETE", "1000")
    assert (await refusal(finish(run, upload))).reason == "UPLOAD_INCOMPLETE"
    await send(run, upload, WEIGHTS, 0, weights[:1000])  # a repeated piece
    await rig.restart()
    again = await begin_upload(run, wanted, request_id=request_id, ttl=ttl(600))
    progress = {file.file.file: file.received_bytes for file in again.files}
    assert progress == {SETTINGS: 0, WEIGHTS: 1000}
    await send(run, again, WEIGHTS, 500, weights[500:])  # half of it is there
    await send(run, again, SETTINGS, 0, files[SETTINGS])
    made = response_of(await finish(run, again), checkpoint_pb2.Checkpoint())
    assert (made.kind, made.version) == (checkpoint_pb2.Checkpoint.KIND_SAMPLER, 0)
    assert made.HasField("expire_time")
    assert files_of(made)[WEIGHTS] == weights
    assert await reason(finish(run, again)) == "UPLOAD_NOT_FOUND"  # it was used up
    loaded = await run.wait(await run.load(made.name, include_optimizer=False))
    assert not loaded.HasField("error")


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([], id="none"),
        pytest.param([(WEIGHTS, {})], id="no-settings"),
        pytest.param([(SETTINGS, {}), ("adapter_model.bin", {})], id="pickle"),
        pytest.param([(SETTINGS, {}), (f"../{WEIGHTS}", {})], id="traversal"),
        pytest.param([(SETTINGS, {}), (f"/etc/{WEIGHTS}", {})], id="absolute"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {}), (WEIGHTS, {})], id="twice"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {}), ("x.py", {})], id="more"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {"size_bytes": 0})], id="empty"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {"size_bytes": -1})], id="negative"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {"size_bytes": 2**62})], id="huge"),
        pytest.param([(SETTINGS, {"size_bytes": 2**20 + 1}), (WEIGHTS, {})], id="large-settings"),
    ],
)
async def test_a_list_of_other_files_is_refused(rig: TrainerRig, files: list[Any]) -> None:
    run = await rig.new_run("lists-of-files")
    wanted = [described(b"abc", name, **changes) for name, changes in files]
    assert await reason(begin_upload(run, wanted)) == "FILE_REFUSED"


async def test_pieces_that_have_no_place_are_refused(rig: TrainerRig) -> None:
    run = await rig.new_run("pieces", project="pieces")
    guest = await rig.new_run("pieces-guest", project="pieces-guest")
    wanted = [described(b"abc", SETTINGS), described(b"x" * 10, WEIGHTS)]
    upload = await begin_upload(run, wanted)
    for file, offset, data, field in [
        ("other", 0, b"x", "file"),
        (f"../{WEIGHTS}", 0, b"x", "file"),
        ("upload.json", 0, b"x", "file"),
        (WEIGHTS, 0, b"x" * 11, "offset_bytes"),
        (WEIGHTS, -1, b"x", "offset_bytes"),
        (WEIGHTS, 2**62, b"x", "offset_bytes"),
        (WEIGHTS, 0, b"", "data"),
    ]:
        error = await refusal(send(run, upload, file, offset, data))
        assert error.metadata["field"] == field
    assert await reason(send(guest, upload, WEIGHTS, 0, b"x")) == "UPLOAD_NOT_FOUND"
    assert await reason(finish(guest, upload)) == "UPLOAD_NOT_FOUND"
    for _ in range(7):
        await begin_upload(run, wanted)
    assert await reason(begin_upload(run, wanted)) == "LIMIT_EXCEEDED"
    rig.passed_s += 24 * 3600 + 60
    await rig.pod.sweep_checkpoints()
    assert await reason(send(run, upload, WEIGHTS, 0, b"x")) == "UPLOAD_NOT_FOUND"
    await begin_upload(run, wanted)


async def test_uploads_of_a_client_that_died_give_way_but_for_one_that_waits_to_be_imported(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run("dead-client", project="dead-client")
    await run.step()
    files = files_of(await run.saved("a"))
    wanted = [described(content, name) for name, content in files.items()]
    complete = await begin_upload(run, wanted)
    for name, content in files.items():
        await send(run, complete, name, 0, content)
    work, may_begin = CheckpointWork.do, asyncio.Event()

    async def wait_and_do(*arguments: Any) -> Made:
        await may_begin.wait()
        return await work(*arguments)

    monkeypatch.setattr(CheckpointWork, "do", wait_and_do)
    request = checkpoint_pb2.ImportCheckpointRequest(upload=complete.name, request_id=new_id())
    operation = await run.call("ImportCheckpoint", request)
    dead = await begin_upload(run, wanted)
    for _ in range(6):
        await begin_upload(run, wanted)
    assert await reason(begin_upload(run, wanted)) == "LIMIT_EXCEEDED"
    rig.passed_s += GIVES_WAY_S + 60
    for _ in range(7):
        await begin_upload(run, wanted)
    assert await reason(begin_upload(run, wanted)) == "LIMIT_EXCEEDED"
    may_begin.set()
    assert await reason(send(run, dead, WEIGHTS, 0, b"x")) == "UPLOAD_NOT_FOUND"
    made = response_of(await run.wait(operation), checkpoint_pb2.Checkpoint())
    assert files_of(made)[WEIGHTS] == files[WEIGHTS]


async def test_hostile_and_unfit_adapters_are_refused_by_name(rig: TrainerRig) -> None:
    run = await rig.new_run("hostile")
    good = files_of(await run.saved("a"))
    settings = json.loads(good[SETTINGS])
    tensors = load(good[WEIGHTS])
    name = next(iter(tensors))

    async def error(weights: bytes = good[WEIGHTS], **changes: Any) -> TinsmithError:
        files = {SETTINGS: json.dumps(settings | changes).encode(), WEIGHTS: weights}
        return error_of(await imported(run, files))

    found = await error(b"\x80\x04\x95" + b"x" * 100)
    assert (found.reason, "pickle" in found.message) == ("FILE_REFUSED", True)
    assert (await error((2**60).to_bytes(8, "little") + b"{}")).reason == "FILE_REFUSED"
    assert (await error(good[WEIGHTS][:-4])).reason == "FILE_REFUSED"
    found = await error(modules_to_save=["lm_head"])
    assert (found.reason, found.metadata["setting"]) == ("ADAPTER_UNSUPPORTED", "modules_to_save")
    found = await error(save(tensors | {name: torch.zeros(3, 3)}))
    assert (found.reason, found.metadata["tensor"]) == ("CHECKPOINT_INCOMPATIBLE", name)
    # What was announced is not what was sent.
    upload = await begin_upload(
        run,
        [described(good[SETTINGS], SETTINGS), described(good[WEIGHTS], WEIGHTS, sha256="0" * 64)],
    )
    for file, content in good.items():
        await send(run, upload, file, 0, content)
    assert error_of(await finish(run, upload)).reason == "FILE_REFUSED"
    done = await imported(run, good, checkpoint_id="a")
    assert error_of(done).reason == "CHECKPOINT_ALREADY_EXISTS"
    assert (await imported(run, good)).HasField("response")
    assert not list((rig.config.data_dir / "scratch").iterdir())
