"""Named checkpoints: saving, loading, listing, changing, expiring and deleting.

A project does everything with its own checkpoints. Of those of others it reads the published ones,
by their names. What it may not read does not exist for it.

A row goes before its files. The ledger remembers the folders of what was deleted or expired until
`remove_folders` removed them, which leaves alone what is being read at the moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from tinsmith_engine import LoraConfig, RunState
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints
from tinsmith_runtime.adapters import adapter_from_json
from tinsmith_runtime.errors import (
    CheckpointAlreadyExistsError,
    CheckpointExpiredError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    NotFoundError,
    ResourceExhaustedError,
)
from tinsmith_runtime.ledger import (
    CheckpointChanges,
    CheckpointRecord,
    ExportRecord,
    Ledger,
    StoredFile,
    StoredKind,
)
from tinsmith_runtime.rpc.requests import decode_position_token, encode_position_token
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_trainer.checkpoints.files import CheckpointFiles
from tinsmith_trainer.execution import snapshot_format
from tinsmith_trainer.residency.weight_exporter import checkpoint_attributes
from tinsmith_trainer.runs.operations import LoadCheckpointWork, SaveCheckpointWork
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.storage_cleanup import READERS_GRACE_S, discard_folder

logger = logging.getLogger(__name__)

GRACE_S = 600.0
"""Files of an expired checkpoint stay so long for readers in other processes."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list, and the token of the next; empty at the end."""

    checkpoints: list[CheckpointRecord]
    next_page_token: str


class CheckpointRegistry:
    """Checkpoints of all runs of a trainer.

    Args:
        host: The engines.
        ledger: Where a checkpoint begins to exist.
        store: Where its files are.
        files: The same store, for what is too large for memory.
        clock: Seconds since the epoch.
        max_checkpoints: Limits the checkpoints of a project.
        max_exports: Limits its exports.
    """

    def __init__(
        self,
        host: EngineHost,
        ledger: Ledger,
        store: ObjectStore,
        files: CheckpointFiles,
        clock: Callable[[], float],
        *,
        max_checkpoints: int,
        max_exports: int,
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._store = store
        self._files = files
        self._clock = clock
        self._limits = {"checkpoints": max_checkpoints, "exports": max_exports}

    async def readable(self, name: str, project: str | None) -> CheckpointRecord:
        """Return a checkpoint that a project may read: its own, or a published one.

        Args:
            name: Of the checkpoint.
            project: The project that asks; None for a pod, which reads everything.

        Raises:
            CheckpointNotFoundError: If there is none of this name for it.
            CheckpointExpiredError: If it was the project's own, and expired.
        """
        record = await self._ledger.get_checkpoint(name)
        is_own = project is None or name.split("/")[1] == project
        if record is not None and not self._is_expired(record):
            if is_own or record.is_published:
                return await self._with_files(record)
            raise checkpoint_not_found(name)
        if is_own:
            expired = record.expire_time_s if record else await self._ledger.get_expiry(name)
            if expired is not None:
                raise CheckpointExpiredError(
                    f"checkpoint {name} expired; save with a longer ttl, or none",
                    checkpoint=name,
                    expire_time_s=int(expired),
                )
        raise checkpoint_not_found(name)

    async def _with_files(self, record: CheckpointRecord) -> CheckpointRecord:
        """Name the files of a checkpoint that was saved before rows did."""
        if record.files:
            return record
        manifest = await asyncio.to_thread(self._files.manifest, record.folder, record.sha256)
        return replace(record, files=stored_files(manifest))

    @contextlib.asynccontextmanager
    async def held(self, name: str, project: str | None) -> AsyncIterator[CheckpointRecord]:
        """Return a checkpoint whose files stay while the context lasts; see `readable`."""
        record = await self.readable(name, project)
        with contextlib.ExitStack() as held:
            while True:
                held.enter_context(self._files.pinned(record.folder))
                # It may have been deleted, and saved anew, before the files were held.
                found = await self.readable(name, project)
                if found.folder == record.folder:
                    break
                record = found
            yield found

    async def update(
        self, name: str, changes: CheckpointChanges, *, key_id: str
    ) -> CheckpointRecord:
        """Change a checkpoint; the caller, with the key `key_id`, has the right to.

        Raises:
            CheckpointNotFoundError: If there is none of this name.
            CheckpointExpiredError: If it expired.
        """
        record = await self._ledger.update_checkpoint(
            name, changes, key_id=key_id, now_s=self._clock()
        )
        if record is None:
            return await self.readable(name, None)
        logger.info(
            "checkpoint changed",
            extra={
                "checkpoint": name,
                "is_published": record.is_published,
                "expire_time_s": record.expire_time_s,
            },
        )
        return record

    async def export(self, name: str, checkpoint: str) -> tuple[ExportRecord, CheckpointRecord]:
        """Return an export, and the checkpoint that it is of.

        Raises:
            NotFoundError: If there is none of this name.
        """
        exported = await self.readable(checkpoint, None)
        export = await self._ledger.get_export(name)
        if export is None or export.expire_time_s <= self._clock():
            raise NotFoundError(f"{name} does not exist; export the checkpoint first", name=name)
        return export, exported

    async def list(self, project: str, run: str | None, *, page_size: int, page_token: str) -> Page:
        """Return checkpoints, newest first.

        Raises:
            InvalidFieldError: If the token is not one that this method returned.
        """
        list_name = f"{run or project}/checkpoints"
        after = decode_position_token(list_name, page_token)
        records = await self._ledger.list_checkpoints(
            project, run, limit=page_size + 1, after=after, now_s=self._clock()
        )
        page = records[:page_size]
        has_more = len(records) > page_size
        last = page[-1] if has_more else None
        token = encode_position_token(list_name, last.create_time_s, last.name) if last else ""
        return Page(page, token)

    async def delete(self, name: str, *, key_id: str) -> None:
        """Delete a checkpoint and its exports on behalf of a key; files go after a short grace.

        Raises:
            CheckpointNotFoundError: If there is none of this name.
            CheckpointExpiredError: If it expired.
        """
        await self.readable(name, None)
        now_s = self._clock()
        deleted = await self._ledger.delete_checkpoint(
            name, key_id=key_id, now_s=now_s, not_before_s=now_s + READERS_GRACE_S
        )
        if deleted is None:
            raise checkpoint_not_found(name)

    async def require_undeleted(self, name: str, path: str) -> None:
        """Refuse a file of what was deleted; of what expired, files are served while they last.

        Args:
            name: The checkpoint or export.
            path: The file.

        Raises:
            NotFoundError: If it was deleted.
        """
        checkpoint = name.partition("/exports/")[0]
        record = await self._ledger.get_checkpoint(checkpoint)
        is_named = record is not None and (
            name != checkpoint or path.rpartition("/")[0] == record.folder
        )
        if not is_named and await self._ledger.get_expiry(checkpoint) is None:
            raise NotFoundError(f"{name} was deleted; its files cannot be fetched", name=name)

    async def remove_folders(self) -> None:
        """Remove the files of what was deleted or expired, but for those that are being read."""
        for folder in await self._ledger.list_folder_deletions(now_s=self._clock()):
            if not self._files.is_pinned(folder) and await discard_folder(self._store, folder):
                await self._ledger.forget_folder_deletion(folder)

    async def save(
        self, run: LiveRun, work: SaveCheckpointWork, sequence_number: int
    ) -> CheckpointRecord:
        """Write the files of a checkpoint; it exists once its row is committed.

        Raises:
            CheckpointAlreadyExistsError: If the run has one of this name.
            ResourceExhaustedError: If the project has as many as it may have.
            StorageFullError: If there is no room.
            StorageUnavailableError: If the store does not answer; the same call goes on later.
        """
        await self.make_way(work.checkpoint)
        await self.require_room(run.project, "checkpoints")
        if await self._ledger.get_checkpoint(work.checkpoint) is not None:
            raise CheckpointAlreadyExistsError(
                f"checkpoint {work.checkpoint} exists; choose another name or delete it first",
                checkpoint=work.checkpoint,
            )
        failpoints.passing("trainer.save")
        version = run.engine.version(run.name)
        files = await self._host.call(
            snapshot_format.checkpoint_files,
            run.engine,
            run.name,
            with_optimizer=work.kind == "training",
        )
        checkpoint_id = work.checkpoint.rpartition("/")[2]
        # The number keeps a deletion of an earlier checkpoint of this name away from its files, the
        # epoch a process that lost the run and does not know it yet.
        name = f"{checkpoint_id}-{sequence_number}-e{run.record.epoch}"
        folder = f"{run.name}/checkpoints/{work.kind}/{name}"
        written = await asyncio.to_thread(
            checkpoint_manifests.write_checkpoint,
            self._store,
            folder,
            files,
            checkpoint_attributes(run, work.kind, version, sequence_number),
        )
        failpoints.passing("trainer.save_written")
        now_s = self._clock()
        return CheckpointRecord(
            name=work.checkpoint,
            run=run.name,
            kind=work.kind,
            base_model=run.record.base_model,
            adapter=run.record.adapter,
            version=version,
            sequence_number=sequence_number,
            size_bytes=written.manifest.size_bytes,
            folder=folder,
            sha256=written.sha256,
            create_time_s=now_s,
            labels=dict(work.labels),
            expire_time_s=None if work.ttl_s is None else now_s + work.ttl_s,
            files=stored_files(written.manifest),
        )

    async def require_room(self, project: str, what: StoredKind) -> None:
        """Raise unless a project may have one more checkpoint or export.

        Those that are being made are not counted, which are few.

        Raises:
            ResourceExhaustedError: If it has as many as it may have.
        """
        limit = self._limits[what]
        if await self._ledger.count_stored(project, what, now_s=self._clock()) >= limit:
            cure = {
                "checkpoints": "delete some, or save with a ttl (`tinsmith checkpoints delete`)",
                "exports": "delete their checkpoints, or wait until they expire",
            }
            raise ResourceExhaustedError(
                f"project {project} has {limit} {what}, which is its limit; {cure[what]}",
                project=project,
                limit=limit,
            )

    async def make_way(self, name: str) -> None:
        """Let go of a checkpoint that expired and was not swept yet, so that its name is free."""
        record = await self._ledger.get_checkpoint(name)
        if record is not None and self._is_expired(record):
            await self.expire()

    async def expire(self) -> int:
        """Forget what expired, and return how much that was; files stay for the grace period."""
        now_s = self._clock()
        return await self._ledger.expire_checkpoints(now_s=now_s, not_before_s=now_s + GRACE_S)

    def _is_expired(self, record: CheckpointRecord) -> bool:
        return record.expire_time_s is not None and record.expire_time_s <= self._clock()

    async def load(self, run: LiveRun, work: LoadCheckpointWork) -> tuple[int, RunState]:
        """Replace the state of a run; return its version and the new state.

        Raises:
            CheckpointNotFoundError: If there is none of this name that the run's project may read.
            CheckpointExpiredError: If it expired.
            CheckpointIncompatibleError: If it does not fit.
            CheckpointCorruptError: If a file does not match the manifest; the run is unchanged.
            StorageUnavailableError: If the store does not answer; the run is unchanged.
        """
        async with self.held(work.checkpoint, run.name.split("/")[1]) as record:
            _check_loadable(record, run, work)
            failpoints.passing("trainer.load")
            manifest, files = await asyncio.to_thread(
                checkpoint_manifests.read_checkpoint,
                self._store,
                record.folder,
                sha256=record.sha256,
            )
        version = await self._host.call(
            snapshot_format.apply_checkpoint,
            run.engine,
            run.name,
            files,
            manifest.attributes,
            include_optimizer=work.include_optimizer,
        )
        state = await self._host.call(run.engine.export_state, run.name)
        failpoints.passing("trainer.loaded")
        return version, state


def _check_loadable(record: CheckpointRecord, run: LiveRun, work: LoadCheckpointWork) -> None:
    """Raise `CheckpointIncompatibleError` unless a checkpoint fits a run."""
    if record.base_model != run.record.base_model:
        raise CheckpointIncompatibleError(
            f"checkpoint {record.name} is of base model {record.base_model}, {run.name} of "
            f"{run.record.base_model}; load it into a run of the same base model",
            checkpoint=record.name,
        )
    if _shape_of(record.adapter) != _shape_of(run.record.adapter):
        raise CheckpointIncompatibleError(
            f"checkpoint {record.name} was trained as {record.adapter}, {run.name} is "
            f"{run.record.adapter}; load it into a run of the same configuration",
            checkpoint=record.name,
        )
    if work.include_optimizer and record.kind != "training":
        raise CheckpointIncompatibleError(
            f"checkpoint {record.name} holds no optimizer state; load it without "
            "include_optimizer, or use a training checkpoint",
            checkpoint=record.name,
        )


def stored_files(manifest: checkpoint_manifests.Manifest) -> tuple[StoredFile, ...]:
    """Return the files of a manifest as rows have them."""
    return tuple(
        StoredFile(name=name, size_bytes=entry.size_bytes, sha256=entry.sha256)
        for name, entry in sorted(manifest.files.items())
    )


def checkpoint_not_found(name: str) -> NotFoundError:
    """Return the error for a checkpoint that does not exist, or belongs to another project."""
    return CheckpointNotFoundError(
        f"checkpoint {name} does not exist in your project; list checkpoints to see their names",
        checkpoint=name,
    )


def _shape_of(adapter: str) -> tuple[object, ...]:
    """Return what must agree for one run to take the weights of another; seeds need not."""
    config = adapter_from_json(adapter)
    if isinstance(config, LoraConfig):
        return (
            config.rank,
            config.alpha,
            config.train_attention,
            config.train_mlp,
            config.train_unembedding,
        )
    return ("full",)
