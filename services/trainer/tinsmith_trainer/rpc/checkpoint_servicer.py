"""Maps CheckpointService onto the checkpoints of the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.longrunning import operations_pb2

from tinsmith import names
from tinsmith.v1 import checkpoint_pb2, checkpoint_pb2_grpc
from tinsmith_runtime.keyed_locks import KeyedLocks
from tinsmith_runtime.ledger import (
    CheckpointChanges,
    CheckpointRecord,
    StoredFile,
    StoredKind,
    TaskRecord,
)
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.requests import decode_page_size, parse_name
from tinsmith_runtime.usage import BudgetGate, Quantity
from tinsmith_trainer.checkpoints.audit import AuditTrail
from tinsmith_trainer.checkpoints.downloads import Downloads
from tinsmith_trainer.checkpoints.registry import CheckpointRegistry, checkpoint_not_found
from tinsmith_trainer.checkpoints.tasks import CheckpointTasks
from tinsmith_trainer.checkpoints.transfers import CheckpointWork
from tinsmith_trainer.checkpoints.uploads import Uploads, upload_not_found
from tinsmith_trainer.ownership.run_registry import RunRegistry, run_not_found
from tinsmith_trainer.rpc import checkpoint_codec, training_codec
from tinsmith_trainer.runs.run import LiveRun

Context = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDomain:
    """What the checkpoint calls are mapped onto.

    Attributes:
        registry: Rows.
        work: Checks what a task asks for before it is accepted.
        tasks: Copies, exports and imports.
        uploads: Files from clients.
        downloads: Files to clients.
        audit: What was done.
        store_uri: Where files are; of the store as it is now, wherever it was before.
        clock: Seconds since the epoch.
        budgets: Refuses what a project has no room for.
    """

    registry: CheckpointRegistry
    work: CheckpointWork
    tasks: CheckpointTasks
    uploads: Uploads
    downloads: Downloads
    audit: AuditTrail
    store_uri: str
    clock: Callable[[], float]
    budgets: BudgetGate


class CheckpointServicer(checkpoint_pb2_grpc.CheckpointServiceServicer):
    """Maps the checkpoint calls onto the domain."""

    def __init__(self, runs: RunRegistry, domain: CheckpointDomain) -> None:
        self._runs = runs
        self._domain = domain
        self._checkpoints = domain.registry
        # By upload: its chunks are written one after the other, whatever a client does. By project:
        # none gives way while it is accepted for an import.
        self._upload_locks = KeyedLocks()

    async def GetCheckpoint(
        self, request: checkpoint_pb2.GetCheckpointRequest, context: Context
    ) -> checkpoint_pb2.Checkpoint:
        name = parse_name(names.CheckpointName, request.name, "name")
        record = await self._checkpoints.readable(str(name), caller_project())
        return training_codec.encode_checkpoint(record, self._domain.store_uri)

    async def ListCheckpoints(
        self, request: checkpoint_pb2.ListCheckpointsRequest, context: Context
    ) -> checkpoint_pb2.ListCheckpointsResponse:
        run: str | None = None
        if request.parent.endswith(training_codec.ALL_RUNS_SUFFIX):
            project = training_codec.decode_all_runs(request.parent)
            current_caller().require_project(project.project, lambda: run_not_found(request.parent))
            project_id = project.project
        else:
            parent = parse_name(names.RunName, request.parent, "parent")
            run, project_id = str(parent), parent.project
            current_caller().require_project(project_id, lambda: run_not_found(request.parent))
            # Checkpoints outlive the trainer that made them: all trainers on the ledger know them.
            await self._runs.require_known(run)
        page = await self._checkpoints.list(
            project_id,
            run,
            page_size=decode_page_size(request.page_size),
            page_token=request.page_token,
        )
        return checkpoint_pb2.ListCheckpointsResponse(
            checkpoints=[
                training_codec.encode_checkpoint(record, self._domain.store_uri)
                for record in page.checkpoints
            ],
            next_page_token=page.next_page_token,
        )

    async def UpdateCheckpoint(
        self, request: checkpoint_pb2.UpdateCheckpointRequest, context: Context
    ) -> checkpoint_pb2.Checkpoint:
        name = _own_checkpoint(request.name)
        changes = checkpoint_codec.decode_changes(request, now_s=self._domain.clock())
        return await self._change(name, changes)

    async def PublishCheckpoint(
        self, request: checkpoint_pb2.PublishCheckpointRequest, context: Context
    ) -> checkpoint_pb2.Checkpoint:
        return await self._change(
            _own_checkpoint(request.name), CheckpointChanges(is_published=True)
        )

    async def UnpublishCheckpoint(
        self, request: checkpoint_pb2.UnpublishCheckpointRequest, context: Context
    ) -> checkpoint_pb2.Checkpoint:
        return await self._change(
            _own_checkpoint(request.name), CheckpointChanges(is_published=False)
        )

    async def DeleteCheckpoint(
        self, request: checkpoint_pb2.DeleteCheckpointRequest, context: Context
    ) -> checkpoint_pb2.DeleteCheckpointResponse:
        name = _own_checkpoint(request.name)
        await self._checkpoints.delete(str(name), key_id=current_caller().key_id)
        return checkpoint_pb2.DeleteCheckpointResponse()

    async def ListCheckpointEvents(
        self, request: checkpoint_pb2.ListCheckpointEventsRequest, context: Context
    ) -> checkpoint_pb2.ListCheckpointEventsResponse:
        query = checkpoint_codec.decode_event_query(request)
        events, next_page_token = await self._domain.audit.list(current_caller(), query)
        return checkpoint_pb2.ListCheckpointEventsResponse(
            events=[checkpoint_codec.encode_event(event) for event in events],
            next_page_token=next_page_token,
        )

    async def CopyCheckpoint(
        self, request: checkpoint_pb2.CopyCheckpointRequest, context: Context
    ) -> operations_pb2.Operation:
        parent = parse_name(names.RunName, request.parent, "parent")
        run = await self._own_run(parent)
        work = checkpoint_codec.decode_copy(request)
        task = self._task("copy", parent, work.checkpoint, request)
        return await self._accept(task, lambda: self._domain.work.check_copy(run.record, work))

    async def ExportCheckpoint(
        self, request: checkpoint_pb2.ExportCheckpointRequest, context: Context
    ) -> operations_pb2.Operation:
        name = _own_checkpoint(request.name)
        # The trainer that holds the run does the task; accepted here, it would wait for ever.
        await self._runs.find(str(name.run_name))
        work = checkpoint_codec.decode_export(request)
        task = self._task("export", name.run_name, request.name, request)
        return await self._accept(task, lambda: self._domain.work.check_export(work), "exports")

    async def ImportCheckpoint(
        self, request: checkpoint_pb2.ImportCheckpointRequest, context: Context
    ) -> operations_pb2.Operation:
        name = _own_upload(request.upload)
        await self._own_run(name.run_name)
        task = self._task("import", name.run_name, "", request)
        async with self._upload_locks.of(name.project):
            known = await self._domain.tasks.find(task.name)
            if known is None:
                await self._require_room(name.project)
                upload, _ = await asyncio.to_thread(self._domain.uploads.complete, str(name))
                task = self._task("import", name.run_name, upload.checkpoint, request)
            return self._describe(await self._domain.tasks.submit(task))

    async def CreateCheckpointDownload(
        self, request: checkpoint_pb2.CreateCheckpointDownloadRequest, context: Context
    ) -> checkpoint_pb2.CheckpointDownload:
        folder, files, checkpoint = await self._downloadable(request.name)
        sources, expire_time_s = self._domain.downloads.sources(
            request.name,
            folder,
            files,
            key_id="" if current_caller().is_pod else current_caller().key_id,
            without_urls=request.without_urls,
        )
        await self._domain.audit.note_download(request.name, checkpoint, current_caller().key_id)
        return checkpoint_codec.encode_download(request.name, sources, expire_time_s)

    async def DownloadCheckpointFile(
        self, request: checkpoint_pb2.DownloadCheckpointFileRequest, context: Context
    ) -> AsyncIterator[checkpoint_pb2.DownloadCheckpointFileResponse]:
        grant = await self._domain.downloads.check(request.name, request.token)
        await self._checkpoints.require_undeleted(grant.name, grant.path)
        offset = request.offset_bytes
        chunks = self._domain.downloads.chunks(grant, offset)
        try:
            while (chunk := await asyncio.to_thread(next, chunks, b"")) != b"":
                yield checkpoint_pb2.DownloadCheckpointFileResponse(offset_bytes=offset, data=chunk)
                offset += len(chunk)
        finally:
            chunks.close()

    async def CreateCheckpointUpload(
        self, request: checkpoint_pb2.CreateCheckpointUploadRequest, context: Context
    ) -> checkpoint_pb2.CheckpointUpload:
        parent = parse_name(names.RunName, request.parent, "parent")
        await self._own_run(parent)
        wanted = checkpoint_codec.decode_upload(parent, request)
        # By project, whose uploads are counted.
        async with self._upload_locks.of(parent.project):
            in_use = await self._domain.tasks.uploads_in_use(parent.project)
            upload = await asyncio.to_thread(self._domain.uploads.create, wanted, in_use=in_use)
        return checkpoint_codec.encode_upload(upload, self._domain.uploads.received(upload))

    async def UploadCheckpointFile(
        self, request: checkpoint_pb2.UploadCheckpointFileRequest, context: Context
    ) -> checkpoint_pb2.CheckpointUpload:
        name = _own_upload(request.upload)
        async with self._upload_locks.of(str(name)):
            upload = await asyncio.to_thread(
                self._domain.uploads.write,
                str(name),
                request.file,
                request.offset_bytes,
                request.data,
            )
        return checkpoint_codec.encode_upload(upload, self._domain.uploads.received(upload))

    async def _change(
        self, name: names.CheckpointName, changes: CheckpointChanges
    ) -> checkpoint_pb2.Checkpoint:
        key_id = current_caller().key_id
        changed = await self._checkpoints.update(str(name), changes, key_id=key_id)
        return training_codec.encode_checkpoint(changed, self._domain.store_uri)

    async def _downloadable(
        self, value: str
    ) -> tuple[str, tuple[StoredFile, ...], CheckpointRecord]:
        """Return folder and files of a checkpoint or export of the caller's project.

        The checkpoint, which may be that of the export, comes third.
        """
        try:
            export = names.CheckpointExportName.parse(value)
        except names.InvalidNameError:
            record = await self._checkpoints.readable(str(_own_checkpoint(value)), None)
            return record.folder, record.files, record
        checkpoint = _own_checkpoint(str(export.checkpoint_name))
        found, record = await self._checkpoints.export(value, str(checkpoint))
        return found.folder, found.files, record

    async def _accept(
        self,
        task: TaskRecord,
        check: Callable[[], Awaitable[object]],
        makes: StoredKind = "checkpoints",
    ) -> operations_pb2.Operation:
        """Accept a task that could be done now; a repeated request returns its operation."""
        if await self._domain.tasks.find(task.name) is None:
            await self._require_room(task.run.split("/")[1], makes)
            await check()
        return self._describe(await self._domain.tasks.submit(task))

    async def _require_room(self, project: str, makes: StoredKind = "checkpoints") -> None:
        self._domain.budgets.require(project, {Quantity.STORED_BYTES})
        await self._checkpoints.require_room(project, makes)

    def _describe(self, task: TaskRecord) -> operations_pb2.Operation:
        return checkpoint_codec.encode_task(task, self._domain.tasks.progress(task.name))

    def _task(self, kind: str, run: names.RunName, checkpoint: str, request: Any) -> TaskRecord:
        return checkpoint_codec.new_task(
            kind,
            run,
            checkpoint,
            request,
            key_id=current_caller().key_id,
            now_s=self._domain.clock(),
        )

    async def _own_run(self, name: names.RunName) -> LiveRun:
        current_caller().require_project(name.project, lambda: run_not_found(str(name)))
        return await self._runs.get(str(name))


def caller_project() -> str | None:
    """Return the project of the caller; None for a pod, which may read everything."""
    caller = current_caller()
    return None if caller.is_pod else caller.project


def _own_checkpoint(value: str) -> names.CheckpointName:
    name = parse_name(names.CheckpointName, value, "name")
    current_caller().require_project(name.project, lambda: checkpoint_not_found(value))
    return name


def _own_upload(value: str) -> names.CheckpointUploadName:
    name = parse_name(names.CheckpointUploadName, value, "upload")
    current_caller().require_project(name.project, lambda: upload_not_found(value))
    return name
