"""Forks: a run becomes the copy of another one as it was after an optimizer step.

What is copied is what a restart would find: the nearest snapshot, and in one transaction the rows
of the operations after it. The run is then restored like any other. So its bits are those that a
recovery of the source would give, compared with the same recorded results. Files are copied and
not shared: the source may be deleted the next moment.

Nothing of the source is written, so it may be held by another trainer, train on, or be retired.
What its trainer drops meanwhile is noticed by the transaction, and the copy is planned anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

from tinsmith_runtime.errors import (
    AbortedError,
    CheckpointCorruptError,
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    StepExpiredError,
    StorageBusyError,
)
from tinsmith_runtime.ledger import Ledger, RunCopy, RunHistory, RunRecord, SnapshotRecord
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_trainer.execution.step_history import BOUNDARY_KINDS, Origin, StepHistory
from tinsmith_trainer.ownership.run_registry import run_not_found
from tinsmith_trainer.runs.operations import Kind, LoadCheckpointWork, WireCodec
from tinsmith_trainer.runs.request_payloads import read_payload

logger = logging.getLogger(__name__)

_REPLAYED = frozenset(
    {Kind.FORWARD_BACKWARD.value, Kind.OPTIM_STEP.value, Kind.LOAD_CHECKPOINT.value}
)
_RERUN = frozenset({Kind.FORWARD.value, Kind.FORWARD_BACKWARD.value, Kind.OPTIM_STEP.value})
_NUM_TRIES = 3
_NUM_COPIES = 8
"""Large requests that are copied at once."""


class _ReplacedError(Exception):
    """A snapshot was deleted while it was copied, because newer ones came."""


class Forks:
    """Copies the past of runs.

    Args:
        ledger: Operations and snapshots.
        store: Their files.
        wire: The stored form of requests and results.
    """

    def __init__(self, ledger: Ledger, store: ObjectStore, wire: WireCodec) -> None:
        self._ledger = ledger
        self._store = store
        self._wire = wire

    async def find(self, run: str, source: str, *, reruns_step: bool) -> int | None:
        """Return the first operation that a fork executes anew, 0 for none; None if it is no copy.

        For a run that was copied by an earlier call whose answer was lost.

        Raises:
            AbortedError: If the run has operations that are not those of the source.
        """
        # What waits is read first: what ends in between is then in one of the two, or in both.
        point = await self._ledger.resume_point(run)
        history = await self._ledger.history(run, BOUNDARY_KINDS)
        if history is None or (point.next_sequence_number == 1 and not point.pending):
            return None
        waiting = [operation.sequence_number for operation in point.pending]
        last = max([0, *waiting, *(operation.sequence_number for operation in history.ended)])
        own, copied = [await self._ledger.get_operation(each, last) for each in (run, source)]
        if own is None or copied is None or own.request_id != copied.request_id:
            raise AbortedError(
                f"{run} has operations that are not of {source}; fork into a new run", run=run
            )
        return self._steps(history).begin_of(last) + 1 if reruns_step else 0

    async def copy(self, target: RunRecord, source: str, step: int, *, reruns_step: bool) -> int:
        """Copy a run as it was after a step into one without operations.

        Args:
            target: The run that becomes the copy, held by this process.
            source: The run to copy.
            step: How many optimizer steps it had.
            reruns_step: Whether the last of them is to be executed anew.

        Returns:
            The first operation that is executed anew; 0 if none is.

        Raises:
            RunNotFoundError: If the ledger does not know the source.
            StepNotFoundError: If the source has no such step.
            StepExpiredError: If what it did there is not kept any more.
            FailedPreconditionError: If the target is of another kind than the source, or the files
                of the source are in another store.
            DataLossError: If every snapshot that is near enough is damaged.
            StorageBusyError: If the source drops what is needed faster than it is copied.
        """
        for _ in range(_NUM_TRIES):
            history = await self._ledger.history(source, BOUNDARY_KINDS)
            if history is None:
                raise run_not_found(source)
            _check_alike(target, history)
            steps = self._steps(history)
            origin = steps.find_rerun(step) if reruns_step else steps.find(step)
            try:
                base = await self._copy_base(target, history, origin)
            except _ReplacedError:
                continue
            after = base.sequence_number if base is not None else 0
            boundary = steps.begin_of(after + 1)
            await self._check_loads(source, steps.loads_between(after, origin.through), step)
            # With the boundary that the base stands on: the copy then knows its step.
            copy = RunCopy(
                source=source,
                target=target.name,
                epoch=target.epoch,
                rows_after=after if boundary < 0 else max(0, boundary - 1),
                requests_after=after,
                through=origin.through,
                snapshot=base,
                version=step - 1 if reruns_step else step,
                rerun_from=origin.begin + 1 if reruns_step else 0,
                submit_time_s=time.time(),
                replayed_kinds=_REPLAYED,
                rerun_kinds=_RERUN,
            )
            if await self._copy_requests(copy) and await self._ledger.copy_run(copy):
                logger.info(
                    "run forked",
                    extra={"run": target.name, "source": source, "step": step, "after": after},
                )
                return copy.rerun_from
        raise StorageBusyError(
            f"{source} drops what step {step} needs while it is copied; send the request again",
            run=source,
        )

    def _steps(self, history: RunHistory) -> StepHistory:
        return StepHistory(history, lambda result: self._wire.decode_load(result).version)

    async def _copy_base(
        self, target: RunRecord, history: RunHistory, origin: Origin
    ) -> SnapshotRecord | None:
        """Copy the nearest intact snapshot, and return its row; None for initial weights."""
        for base in origin.bases:
            if base is None:
                return None
            folder = f"{target.name}/snapshots/{base.sequence_number}-e{target.epoch}"
            try:
                # Verified first: the copy will have no older one to fall back to.
                await asyncio.to_thread(
                    checkpoint_manifests.verify_checkpoint,
                    self._store,
                    base.folder,
                    sha256=base.sha256,
                )
                await asyncio.to_thread(
                    checkpoint_manifests.copy_checkpoint, self._store, base.folder, folder
                )
            except (CheckpointCorruptError, NotFoundError) as error:
                if base not in await self._ledger.list_snapshots(history.run.name):
                    raise _ReplacedError from error
                logger.error(
                    "snapshot cannot be copied, trying an older one",
                    extra={"run": history.run.name, "problem": error.message},
                )
                continue
            return dataclasses.replace(base, run=target.name, folder=folder)
        raise DataLossError(
            f"every snapshot of {history.run.name} that step {origin.step} could be computed from "
            "is damaged; restore them from a backup",
            run=history.run.name,
        )

    async def _check_loads(self, source: str, loads: list[int], step: int) -> None:
        """Make sure that the checkpoints that a replay loads again are still there.

        Raises:
            StepExpiredError: If one was deleted.
        """
        for number in loads:
            [record] = await self._ledger.operations_from(source, number, limit=1)
            work = self._wire.decode_work(
                Kind.LOAD_CHECKPOINT, await read_payload(self._store, record)
            )
            name = work.checkpoint if isinstance(work, LoadCheckpointWork) else ""
            if await self._ledger.get_checkpoint(name) is None:
                raise StepExpiredError(
                    f"step {step} of {source} cannot be computed again: {name}, which operation "
                    f"{number} loaded, was deleted, and no snapshot is nearer",
                    run=source,
                    step=step,
                )

    async def _copy_requests(self, copy: RunCopy) -> bool:
        """Copy the large requests; return False if one is gone."""
        slots = asyncio.Semaphore(_NUM_COPIES)

        async def copy_one(path: str) -> None:
            target = copy.target + path.removeprefix(copy.source)
            async with slots:
                await asyncio.to_thread(self._store.copy, path, target)

        paths = await self._ledger.stored_requests(copy)
        copies = [asyncio.ensure_future(copy_one(path)) for path in paths]
        try:
            await asyncio.gather(*copies)
        except NotFoundError:
            return False
        finally:
            for each in copies:
                each.cancel()
        return True


def _check_alike(target: RunRecord, history: RunHistory) -> None:
    """Raise `FailedPreconditionError` unless a run can be a copy of another one here."""
    source = history.run
    if (target.base_model, target.adapter) != (source.base_model, source.adapter):
        raise FailedPreconditionError(
            f"{target.name} trains something else than {source.name}; a fork is of the same base "
            "model and adapter",
            run=target.name,
        )
    if not history.is_here:
        raise FailedPreconditionError(
            f"the files of {source.name} are in another store than those of this trainer; fork it "
            "in the pool where it was trained",
            run=source.name,
        )
