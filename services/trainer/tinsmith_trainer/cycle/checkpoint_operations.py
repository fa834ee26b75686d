"""Saves and loads: slices of their own, which do not go through the packed pass.

They mostly wait for files, so they run beside the cycles of other runs and take the engine's thread
only to copy rows. The caller holds the lock of the run, which is resident. While the store is away,
an accepted save or load waits, and its run says so.
"""

from __future__ import annotations

from tinsmith_runtime.errors import StorageUnavailableError
from tinsmith_runtime.ledger import OperationOutcome
from tinsmith_trainer.checkpoints.registry import CheckpointRegistry
from tinsmith_trainer.cycle.committer import Committer
from tinsmith_trainer.residency.manager import Residency
from tinsmith_trainer.runs.accumulation import Accumulation
from tinsmith_trainer.runs.operations import (
    Kind,
    LoadCheckpointWork,
    LoadResult,
    Result,
    SaveCheckpointWork,
    WireCodec,
)
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import QueuedOperation


class CheckpointSlices:
    """Executes saves and loads.

    Args:
        checkpoints: Files and names.
        committer: Makes the results durable.
        residency: Writes the snapshot that belongs to a load.
        wire: The stored form of results.
    """

    def __init__(
        self,
        checkpoints: CheckpointRegistry,
        committer: Committer,
        residency: Residency,
        wire: WireCodec,
    ) -> None:
        self._checkpoints = checkpoints
        self._committer = committer
        self._residency = residency
        self._wire = wire

    async def execute(self, run: LiveRun, operation: QueuedOperation) -> None:
        """Do what a save or load asks for, and commit it.

        Raises:
            TinsmithError: Why it cannot be done; nothing was changed or committed.
            StoppedError: If the pod stops while the disk is full or the object store away.
        """
        await self._committer.begin([(run, [operation])])
        match operation.work:
            case SaveCheckpointWork():
                await self._save(run, operation, operation.work)
            case LoadCheckpointWork():
                await self._load(run, operation, operation.work)
            case _:
                raise TypeError(f"{type(operation.work).__name__} is neither a save nor a load")

    async def _save(
        self, run: LiveRun, operation: QueuedOperation, work: SaveCheckpointWork
    ) -> None:
        record = await self._committer.durably(
            [run],
            lambda: self._checkpoints.save(run, work, operation.sequence_number),
            waits_for=(StorageUnavailableError,),
        )
        outcome = self._outcome(run, operation, record.version, Kind.SAVE_CHECKPOINT, record)
        await self._committer.commit(run, [outcome], checkpoints=[record])
        run.state.commit(operation.sequence_number)

    async def _load(
        self, run: LiveRun, operation: QueuedOperation, work: LoadCheckpointWork
    ) -> None:
        number = operation.sequence_number
        version, state = await self._committer.durably(
            [run],
            lambda: self._checkpoints.load(run, work),
            waits_for=(StorageUnavailableError,),
        )
        # A replay must not depend on a checkpoint that its owner may delete: the loaded state is
        # saved with the operation itself.
        snapshot = await self._committer.durably(
            [run],
            lambda: self._residency.write_snapshot(run, state, number, Accumulation()),
        )
        outcome = self._outcome(run, operation, version, Kind.LOAD_CHECKPOINT, LoadResult(version))
        run.queue.set_accumulation(Accumulation())
        await self._committer.commit(run, [outcome], snapshots=[snapshot])
        run.state.load(number)

    def _outcome(
        self, run: LiveRun, operation: QueuedOperation, version: int, kind: Kind, result: Result
    ) -> OperationOutcome:
        encoded = self._wire.encode_result(kind, result)
        return self._committer.outcome(run, operation, version, result=encoded)
