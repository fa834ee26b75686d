"""What was done to the checkpoints of a project can be listed, by its admins."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import duration_pb2, field_mask_pb2
from tests.fakes.scheduler import bearer
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    Metadata,
    RunClient,
    TrainerRig,
    error_of,
    new_id,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import audit_pb2, checkpoint_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_runtime.rpc.permissions import KeyRole

PEFT = checkpoint_pb2.CheckpointExport.FORMAT_PEFT
DAY_S = 24 * 3600.0


@pytest.fixture
async def rig(
    tmp_path: Path, engine_host: EngineHost, database_url: str
) -> AsyncIterator[TrainerRig]:
    settings = {"checkpoint_sweep_interval_s": 3600.0, "database_url": database_url}
    async with running_trainer(tmp_path / "data", engine_host, **settings) as rig:
        yield rig


async def list_events(
    rig: TrainerRig, project: str, metadata: Metadata | None = None, **fields: Any
) -> list[audit_pb2.AuditEvent]:
    """Return all pages of a list."""
    metadata = metadata or bearer(rig.scheduler.new_key(project, KeyRole.ADMIN))
    request = checkpoint_pb2.ListCheckpointEventsRequest(parent=f"projects/{project}", **fields)
    events: list[audit_pb2.AuditEvent] = []
    while True:
        answer = await rig.stub.ListCheckpointEvents(request, metadata=metadata, timeout=TIMEOUT_S)
        assert len(answer.events) <= (request.page_size or 100)
        events += answer.events
        request.page_token = answer.next_page_token
        if not answer.next_page_token:
            return events


def actions(events: list[audit_pb2.AuditEvent]) -> list[tuple[str, str]]:
    return [(event.action.removesuffix("_checkpoint"), event.resource) for event in events]


def key_of(run: RunClient) -> str:
    return ApiKey.parse(run.metadata[0][1].removeprefix("Bearer ")).key_id


async def change(run: RunClient, method: str, name: str) -> Any:
    message = getattr(checkpoint_pb2, f"{method}CheckpointRequest")
    return await run.call(f"{method}Checkpoint", message(name=name))


async def update(run: RunClient, name: str, *paths: str, **fields: Any) -> Any:
    request = checkpoint_pb2.UpdateCheckpointRequest(
        name=name, update_mask=field_mask_pb2.FieldMask(paths=paths), **fields
    )
    return await run.call("UpdateCheckpoint", request)


async def copy(run: RunClient, source: str, checkpoint_id: str, request_id: str = "") -> Any:
    request = checkpoint_pb2.CopyCheckpointRequest(
        parent=run.name,
        source_checkpoint=source,
        checkpoint_id=checkpoint_id,
        request_id=request_id or new_id(),
    )
    return await run.wait(await run.call("CopyCheckpoint", request))


async def export(
    run: RunClient, name: str, request_id: str = ""
) -> checkpoint_pb2.CheckpointExport:
    request = checkpoint_pb2.ExportCheckpointRequest(
        name=name, format=PEFT, request_id=request_id or new_id()
    )
    done = await run.wait(await run.call("ExportCheckpoint", request))
    made: checkpoint_pb2.CheckpointExport = response_of(done, checkpoint_pb2.CheckpointExport())
    return made


async def download(run: RunClient, name: str) -> checkpoint_pb2.CheckpointDownload:
    request = checkpoint_pb2.CreateCheckpointDownloadRequest(name=name)
    answer: checkpoint_pb2.CheckpointDownload = await run.call("CreateCheckpointDownload", request)
    return answer


async def fetched(run: RunClient, name: str) -> dict[str, bytes]:
    """Return the files of a checkpoint or export."""
    files = {}
    for source in (await download(run, name)).sources:
        request = checkpoint_pb2.DownloadCheckpointFileRequest(name=name, token=source.token)
        stream = run.rig.stub.DownloadCheckpointFile(
            request, metadata=run.metadata, timeout=TIMEOUT_S
        )
        files[source.file.file] = b"".join([piece.data async for piece in stream])
    return files


async def import_files(run: RunClient, files: dict[str, bytes], checkpoint_id: str) -> Any:
    """Upload files and make a checkpoint of them; return the operation at its end."""
    described = [
        checkpoint_pb2.CheckpointFile(
            file=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
        )
        for name, content in files.items()
    ]
    request = checkpoint_pb2.CreateCheckpointUploadRequest(
        parent=run.name, checkpoint_id=checkpoint_id, files=described, request_id=new_id()
    )
    upload = await run.call("CreateCheckpointUpload", request)
    for name, content in files.items():
        piece = checkpoint_pb2.UploadCheckpointFileRequest(
            upload=upload.name, file=name, offset_bytes=0, data=content
        )
        await run.call("UploadCheckpointFile", piece)
    finish = checkpoint_pb2.ImportCheckpointRequest(upload=upload.name, request_id=new_id())
    return await run.wait(await run.call("ImportCheckpoint", finish))


async def test_each_action_is_listed_once_with_its_key(rig: TrainerRig) -> None:
    run = await rig.new_run()
    saved = await run.saved("a", labels={"note": "x"})
    colleague = RunClient(rig, run.name, rig.scheduler.new_key("p"))
    once, again = new_id(), new_id()
    for _ in range(2):
        await change(run, "Publish", saved.name)
        await update(run, saved.name, "labels", labels={"note": "y"})
    for _ in range(2):
        await change(colleague, "Unpublish", saved.name)
    exports = [await export(one, saved.name, once) for one in (run, colleague)]
    files = await fetched(colleague, exports[0].name)
    copies = [await copy(one, saved.name, "b", again) for one in (run, colleague)]
    assert copies[0].name == copies[1].name
    response_of(await import_files(run, files, "c"), checkpoint_pb2.Checkpoint())
    await download(run, f"{run.name}/checkpoints/c")
    await change(colleague, "Delete", saved.name)
    of = f"{run.name}/checkpoints"
    await change(run, "Delete", f"{of}/b")

    events = await list_events(rig, "p")
    assert actions(events) == [
        ("publish", saved.name),
        ("update", saved.name),
        ("unpublish", saved.name),
        ("export", saved.name),
        ("download", exports[0].name),
        ("copy", f"{of}/b"),
        ("import", f"{of}/c"),
        ("download", f"{of}/c"),
        ("delete", saved.name),
        ("delete", f"{of}/b"),
    ]
    mine, theirs = key_of(run), key_of(colleague)
    assert [event.key_id for event in events] == [
        *(mine, mine, theirs, mine, theirs),
        *(mine, mine, mine, theirs, mine),
    ]
    sampler = {event.resource for event in events if event.checkpoint_kind == "sampler"}
    assert sampler == {f"{of}/c"}
    assert {event.checkpoint_kind for event in events} == {"training", "sampler"}


async def test_events_outlast_the_process_and_the_run(rig: TrainerRig) -> None:
    run = await rig.new_run()
    saved = await run.saved("a")
    await change(run, "Publish", saved.name)
    await rig.restart()
    released = trainer_control_pb2.ReleaseRunRequest(
        run=run.name, epoch=2, mode=trainer_control_pb2.ReleaseRunRequest.MODE_DELETE
    )
    await rig.adopt(run.name, epoch=2)
    await run.call("ReleaseRun", released, metadata=pod("scheduler"))
    assert actions(await list_events(rig, "p")) == [("publish", saved.name)]


async def test_what_others_read_is_not_listed_and_what_they_make_is_theirs(
    rig: TrainerRig,
) -> None:
    owner = await rig.new_run("r", project="p")
    guest = await rig.new_run("g", project="q")
    saved = await owner.saved("a")
    await change(owner, "Publish", saved.name)
    await guest.call("GetCheckpoint", checkpoint_pb2.GetCheckpointRequest(name=saved.name))
    response_of(
        await guest.wait(await guest.load(saved.name)), trainer_pb2.LoadCheckpointResponse()
    )
    made = response_of(await copy(guest, saved.name, "b"), checkpoint_pb2.Checkpoint())
    assert actions(await list_events(rig, "p")) == [("publish", saved.name)]
    assert actions(await list_events(rig, "q")) == [("copy", made.name)]


async def test_what_failed_or_happened_by_itself_is_not_listed(rig: TrainerRig) -> None:
    run = await rig.new_run()
    stranger = await rig.new_run("g", project="q")
    saved = await run.saved("a", ttl=duration_pb2.Duration(seconds=60))
    for method in ("Publish", "Unpublish", "Delete"):
        for caller, name in ((run, f"{run.name}/checkpoints/none"), (stranger, saved.name)):
            refused = await refusal(change(caller, method, name))
            assert refused.reason == "CHECKPOINT_NOT_FOUND"
    assert (await refusal(download(stranger, saved.name))).reason == "CHECKPOINT_NOT_FOUND"
    error = error_of(await copy(run, saved.name, "a"))
    assert error.reason == "CHECKPOINT_ALREADY_EXISTS"
    rig.passed_s += 61
    await rig.pod.sweep_checkpoints()
    assert (await refusal(change(run, "Publish", saved.name))).reason == "CHECKPOINT_EXPIRED"
    assert await list_events(rig, "p") == []
    assert await list_events(rig, "q") == []


async def test_pages_windows_and_age(rig: TrainerRig) -> None:
    run = await rig.new_run()
    saved = await run.saved("a")
    for number in range(5):
        await change(run, "Unpublish" if number % 2 else "Publish", saved.name)
        rig.passed_s += DAY_S
    events = await list_events(rig, "p")
    assert [event.action.partition("_")[0] for event in events] == [
        *("publish", "unpublish", "publish", "unpublish", "publish")
    ]
    assert await list_events(rig, "p", page_size=2) == events
    window: dict[str, Any] = {"start_time": events[1].time, "end_time": events[3].time}
    assert await list_events(rig, "p", page_size=1, **window) == events[1:3]
    assert await list_events(rig, "p", end_time=events[0].time) == []

    rig.passed_s += (400 - 5) * DAY_S
    await rig.pod.sweep_checkpoints()
    assert await list_events(rig, "p") == events[1:]
    await rig.restart(audit_retention_s=DAY_S)
    await rig.pod.sweep_checkpoints()
    assert await list_events(rig, "p") == []


async def test_only_admins_of_the_project_read_them(rig: TrainerRig) -> None:
    keys = [
        rig.scheduler.new_key("p"),
        rig.scheduler.new_key("q", KeyRole.ADMIN),
    ]
    for metadata in (*map(bearer, keys), pod("gateway")):
        refused = await refusal(list_events(rig, "p", metadata))
        assert (refused.code.name, refused.reason) == ("PERMISSION_DENIED", "ROLE_MISSING")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("page_token", "x", id="no-token"),
        pytest.param("page_token", "1.0:" + "9" * 19, id="large-serial"),
        pytest.param("page_token", "1.e-:1", id="no-time"),
        pytest.param("page_size", 1001, id="large-page"),
        pytest.param("page_size", -1, id="negative-page"),
        pytest.param("parent", "projects/p/trainingRuns/-", id="no-project"),
    ],
)
async def test_a_malformed_request_is_refused(rig: TrainerRig, field: str, value: Any) -> None:
    request = checkpoint_pb2.ListCheckpointEventsRequest(**{"parent": "projects/p", field: value})
    metadata = bearer(rig.scheduler.new_key("p", KeyRole.ADMIN))
    refused: TinsmithError = await refusal(
        rig.stub.ListCheckpointEvents(request, metadata=metadata, timeout=TIMEOUT_S)
    )
    assert refused.reason == "INVALID_FIELD"
    assert field in str(refused)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_download_that_can_not_be_recorded_is_not_granted(rig: TrainerRig) -> None:
    run = await rig.new_run()
    saved = await run.saved("a")
    rig.limit_ledger(spare_pages=0)
    granted: list[checkpoint_pb2.CheckpointDownload] = []

    async def fill_the_pages() -> None:
        while len(granted) < 200:
            granted.append(await download(run, saved.name))

    assert (await refusal(fill_the_pages())).reason == "STORAGE_FULL"
    rig.limit_ledger(spare_pages=None)
    assert actions(await list_events(rig, "p")) == [("download", saved.name)] * len(granted)
