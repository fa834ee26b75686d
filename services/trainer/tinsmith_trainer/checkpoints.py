"""Named checkpoints: saving, loading, listing and deleting."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tinsmith_engine import LoraConfig, RunState
from tinsmith_engine import codec as engine_codec
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints, manifests
from tinsmith_runtime.errors import (
    CheckpointAlreadyExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    InvalidFieldError,
    NotFoundError,
)
from tinsmith_runtime.ledger import CheckpointRecord, Ledger
from tinsmith_runtime.storage import ObjectStore
from tinsmith_trainer import state_files
from tinsmith_trainer.live_run import LiveRun
from tinsmith_trainer.publisher import checkpoint_attributes
from tinsmith_trainer.work import LoadCheckpointWork, SaveCheckpointWork


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
    """

    def __init__(self, host: EngineHost, ledger: Ledger, store: ObjectStore) -> None:
        self._host = host
        self._ledger = ledger
        self._store = store

    async def get(self, name: str) -> CheckpointRecord:
        """Return a checkpoint.

        Raises:
            CheckpointNotFoundError: If there is none of this name.
        """
        record = await self._ledger.get_checkpoint(name)
        if record is None:
            raise checkpoint_not_found(name)
        return record

    async def list(self, project: str, run: str | None, *, page_size: int, page_token: str) -> Page:
        """Return checkpoints, newest first.

        Raises:
            InvalidFieldError: If the token is not one that this method returned.
        """
        after = _decode_position(page_token) if page_token else None
        records = await self._ledger.list_checkpoints(
            project, run, limit=page_size + 1, after=after
        )
        page = records[:page_size]
        has_more = len(records) > page_size
        return Page(page, f"{page[-1].create_time_s!r}:{page[-1].name}" if has_more else "")

    async def delete(self, name: str) -> None:
        """Delete a checkpoint and its files.

        Raises:
            CheckpointNotFoundError: If there is none of this name.
        """
        record = await self._ledger.delete_checkpoint(name)
        if record is None:
            raise checkpoint_not_found(name)
        await asyncio.to_thread(self._store.delete_folder, record.folder)

    async def save(
        self, run: LiveRun, work: SaveCheckpointWork, sequence_number: int
    ) -> CheckpointRecord:
        """Write the files of a checkpoint; it exists once its row is committed.

        Raises:
            CheckpointAlreadyExistsError: If the run has one of this name.
            StorageFullError: If there is no room.
        """
        if await self._ledger.get_checkpoint(work.checkpoint) is not None:
            raise CheckpointAlreadyExistsError(
                f"checkpoint {work.checkpoint} exists; choose another name or delete it first",
                checkpoint=work.checkpoint,
            )
        failpoints.passing("trainer.save")
        version = run.engine.version(run.name)
        files = await self._host.call(
            state_files.checkpoint_files,
            run.engine,
            run.name,
            with_optimizer=work.kind == "training",
        )
        checkpoint_id = work.checkpoint.rpartition("/")[2]
        # The number keeps a deletion of an earlier checkpoint of this name away from its files.
        folder = f"{run.name}/checkpoints/{work.kind}/{checkpoint_id}-{sequence_number}"
        written = await asyncio.to_thread(
            manifests.write_checkpoint,
            self._store,
            folder,
            files,
            checkpoint_attributes(run, work.kind, version, sequence_number),
        )
        failpoints.passing("trainer.save_written")
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
            manifest_uri=written.uri,
            sha256=written.sha256,
            create_time_s=time.time(),
            labels=dict(work.labels),
        )

    async def check_loadable(self, run: LiveRun, work: LoadCheckpointWork) -> CheckpointRecord:
        """Return the checkpoint that a load names, if it fits the run.

        Raises:
            CheckpointNotFoundError: If there is none of this name.
            CheckpointIncompatibleError: If it does not fit.
        """
        record = await self.get(work.checkpoint)
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
        return record

    async def load(self, run: LiveRun, work: LoadCheckpointWork) -> tuple[int, RunState]:
        """Replace the state of a run; return its version and the new state.

        Raises:
            CheckpointCorruptError: If a file does not match the manifest; the run is unchanged.
        """
        record = await self.check_loadable(run, work)
        failpoints.passing("trainer.load")
        manifest, files = await asyncio.to_thread(
            manifests.read_checkpoint, self._store, record.folder, sha256=record.sha256
        )
        version = await self._host.call(
            state_files.apply_checkpoint,
            run.engine,
            run.name,
            files,
            manifest.attributes,
            include_optimizer=work.include_optimizer,
        )
        state = await self._host.call(run.engine.export_state, run.name)
        failpoints.passing("trainer.loaded")
        return version, state


def checkpoint_not_found(name: str) -> NotFoundError:
    """Return the error for a checkpoint that does not exist, or belongs to somebody else."""
    return CheckpointNotFoundError(
        f"checkpoint {name} does not exist in your project; list checkpoints to see their names",
        checkpoint=name,
    )


def _shape_of(adapter: str) -> tuple[object, ...]:
    """Return what must agree for one run to take the weights of another; seeds need not."""
    config = engine_codec.adapter_from_json(adapter)
    if isinstance(config, LoraConfig):
        return (
            config.rank,
            config.alpha,
            config.train_attention,
            config.train_mlp,
            config.train_unembedding,
        )
    return ("full",)


def _decode_position(page_token: str) -> tuple[float, str]:
    time_s, separator, name = page_token.partition(":")
    try:
        if separator:
            return float(time_s), name
    except ValueError:
        pass
    raise InvalidFieldError("page_token", "is not a token of this list; start without one")
