"""What a run does beside the cycles, for itself: restores, saves, loads, snapshots, and failing.

All of it may take long and none of it holds up another run. The caller holds the lock of the run
and releases it afterwards. What goes wrong here concerns this run alone. An operation that
cannot be done fails with a typed error. An error that is not typed is a bug, and after a bug the
run is brought back from the ledger.
"""

from __future__ import annotations

import asyncio
import logging

from tinsmith_runtime.errors import (
    DrainingError,
    PoisonOperationError,
    RunClosedError,
    RunMovedError,
    StorageUnavailableError,
    TinsmithError,
    internal_error,
)
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_trainer.cycle.checkpoint_operations import CheckpointSlices
from tinsmith_trainer.cycle.committer import Committer, StoppedError
from tinsmith_trainer.execution.engine_calls import is_gradient
from tinsmith_trainer.execution.run_health import RUN_HEALTH
from tinsmith_trainer.execution.slices import Slice
from tinsmith_trainer.metrics import OPERATIONS
from tinsmith_trainer.residency.manager import Residency, StateCopy
from tinsmith_trainer.runs.accumulation import Accumulation
from tinsmith_trainer.runs.operations import OptimStepWork
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import QueuedOperation
from tinsmith_trainer.runs.storage_retry import STORAGE_RETRY_S

logger = logging.getLogger(__name__)


class RunTasks:
    """Executes what concerns one run alone; every method raises `FencedError` and no other error.

    Args:
        residency: Which runs are in the engine.
        committer: Makes results durable.
        saves: Executes saves and loads.
        max_attempts: Deaths of the process after which an operation is given up.
    """

    def __init__(
        self,
        residency: Residency,
        committer: Committer,
        saves: CheckpointSlices,
        *,
        max_attempts: int,
    ) -> None:
        self._residency = residency
        self._committer = committer
        self._saves = saves
        self._max_attempts = max_attempts

    async def restore(self, run: LiveRun) -> None:
        """Bring a run into the engine, however long that takes."""
        try:
            await self._residency.ensure(run, wait_s=None)
        except FencedError:
            raise
        except (RunClosedError, RunMovedError):
            return
        except (OSError, StorageUnavailableError) as error:
            # The store is away: nothing that an operation should fail for.
            logger.warning("run not restored", extra={"run": run.name, "problem": str(error)})
            if isinstance(error, StorageUnavailableError):
                run.block(error.message)
            else:
                run.block("the trainer's store, which cannot be read at the moment")
            await asyncio.sleep(STORAGE_RETRY_S)
        except Exception as error:
            await self._fail(run, error)

    async def execute(self, aside: Slice) -> None:
        """Do a save or load, or give up an operation that killed the process too often."""
        run, operation = aside.run, aside.first
        num_attempts = operation.record.num_attempts
        run.queue.start([operation.sequence_number])
        try:
            if num_attempts >= self._max_attempts:
                raise PoisonOperationError(
                    f"the trainer died {num_attempts} times while it ran operation "
                    f"{operation.sequence_number} of {run.name}; it is not tried again, change the "
                    "request",
                    run=run.name,
                    sequence_number=operation.sequence_number,
                )
            self._residency.touch(run)
            run.state.compute()
            await self._saves.execute(run, operation)
        except FencedError:
            raise
        except StoppedError:
            await self._residency.evict(run)
        except Exception as error:
            await self._fail(run, error)

    async def write_snapshot(self, run: LiveRun, copied: StateCopy) -> None:
        """Save a copy of the state of a run, so that a replay begins there; needs no lock."""
        try:
            await self._residency.write_copy(run, copied)
        except FencedError:
            # A run that was given up meanwhile is held by another trainer, as it should be.
            if run.is_staying:
                raise
        except Exception as error:
            # The results are committed: a snapshot is an economy, and is tried again later.
            logger.warning("snapshot put off", extra={"run": run.name, "problem": str(error)})
        finally:
            run.state.end_save()

    async def undo(self, run: LiveRun, error: Exception, *, is_alone: bool) -> None:
        """Bring a run back to what the ledger says after its cycle broke.

        Any of several operations may have broken it: each is tried alone next time. One that
        was alone is failed.
        """
        if isinstance(error, FencedError):
            raise error
        await self._residency.evict(run)
        if isinstance(error, StoppedError):
            return
        if isinstance(error, DrainingError):
            await asyncio.sleep(STORAGE_RETRY_S)
        elif is_alone and len(run.queue.running) == 1:
            await self._fail(run, error)
        else:
            logger.error("cycle broke by a bug", exc_info=error, extra={"run": run.name})
            run.queue.suspect_running()

    async def _fail(self, run: LiveRun, reason: Exception) -> None:
        """End the next operation of a run; leave the others in the queue."""
        operation = run.queue.get(run.queue.next_sequence_number)
        error = reason if isinstance(reason, TinsmithError) else internal_error()
        if error is not reason:
            logger.error("operation failed by a bug", exc_info=reason, extra={"run": run.name})
        try:
            if error is not reason or _is_step(operation):
                # Replay clears the gradient of a failed step; a resident run must agree with it.
                await self._residency.evict(run)
            if operation is not None:
                await self._commit_failure(run, operation, error)
        except FencedError:
            raise
        except StoppedError:
            await self._residency.evict(run)
        except Exception:
            # It is still in the queue: no client was told a result.
            logger.exception("operation not ended; tried again", extra={"run": run.name})
            await asyncio.sleep(STORAGE_RETRY_S)

    async def _commit_failure(
        self, run: LiveRun, operation: QueuedOperation, error: TinsmithError
    ) -> None:
        if is_gradient(operation):
            run.queue.add_failure(operation.sequence_number)
        elif _is_step(operation):
            run.queue.set_accumulation(Accumulation())
        outcome = self._committer.outcome(run, operation, run.record.version, error=error)
        await self._committer.commit(run, [outcome])
        OPERATIONS.labels(operation.record.kind, "failed").inc()
        RUN_HEALTH.note_end(run.name, error)
        if run.state.is_resident:
            run.state.commit(operation.sequence_number)


def _is_step(operation: QueuedOperation | None) -> bool:
    return operation is not None and isinstance(operation.work, OptimStepWork)
