"""Makes intents and results durable, and only then tells the callers that wait.

The runs of a cycle go to the ledger together and share its sync; each has a fence of its own. If
the disk is full, what was acknowledged is not given up: the commit waits for space. Its runs wait
and say why, and the cycles of others go on until they come to the same point. Work that needs an
object store that is away waits in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tinsmith_engine import BatchResult, OptimStepResult
from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import (
    OutcomeUnknownError,
    StorageBusyError,
    StorageFullError,
    StorageUnavailableError,
    TinsmithError,
)
from tinsmith_runtime.ledger import (
    Attempts,
    CheckpointRecord,
    Commit,
    Ledger,
    OperationOutcome,
    OperationRecord,
    SnapshotRecord,
)
from tinsmith_runtime.usage import NOTHING, BudgetGate, UsageAmounts
from tinsmith_trainer.execution.engine_calls import Computed, SliceResult
from tinsmith_trainer.execution.numerics_plan import NumericsPlan
from tinsmith_trainer.execution.run_health import RUN_HEALTH
from tinsmith_trainer.metrics import (
    COMMIT_SECONDS,
    OPERATION_SECONDS,
    OPERATIONS,
    TRAINED_TOKENS,
)
from tinsmith_trainer.runs.operations import ForwardWork, Kind, WireCodec
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import QueuedOperation
from tinsmith_trainer.runs.storage_retry import STORAGE_RETRY_S

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Finish = Callable[[LiveRun, list[OperationRecord]], None]
Settle = Callable[[SliceResult, Exception | None], None]
Note = Callable[[str, Sequence[Computed]], None]

_PASSING = (StorageFullError, StorageBusyError, StorageUnavailableError)
"""What a write waits for to end: nothing was written, and it may be repeated."""


class StoppedError(Exception):
    """The pod stops while a write waits for space or the object store.

    What is in the ledger is done again later.
    """


class Committer:
    """Writes what the cycle, the saves and the gap watcher decide.

    Args:
        ledger: Where results become durable.
        wire: The stored form of results.
        finish: Takes finished operations out of the queue of their run, and wakes waiting callers.
        budgets: Told what projects used, once it is durable.
        note: Told what was computed of a run, once it is durable.
    """

    def __init__(
        self,
        ledger: Ledger,
        wire: WireCodec,
        finish: Finish,
        *,
        budgets: BudgetGate,
        note: Note = lambda *_: None,
    ) -> None:
        self._ledger = ledger
        self._budgets = budgets
        self._wire = wire
        self._finish = finish
        self._note = note
        self._is_stopping = False

    def stop(self) -> None:
        """Give up waiting for space from now on."""
        self._is_stopping = True

    async def begin(self, operations: Sequence[tuple[LiveRun, Sequence[QueuedOperation]]]) -> None:
        """Count an attempt of operations of several runs.

        Raises:
            StoppedError: If the pod stops while the disk is full.
        """
        attempts = [
            Attempts(
                run=run.name,
                epoch=run.record.epoch,
                numbers={each.sequence_number: each.record.num_attempts + 1 for each in queued},
            )
            for run, queued in operations
        ]
        runs = [run for run, _ in operations]
        failpoints.passing("trainer.intend")
        await self.durably(runs, lambda: self._ledger.start_all(attempts))
        failpoints.passing("trainer.intended")

    async def commit_computed(self, results: Sequence[SliceResult], settle: Settle) -> None:
        """Commit what was computed of several runs.

        Args:
            results: At least one operation of each run.
            settle: Told of each run as soon as it is known: what kept it from being durable, or
                None. One run does not depend on another.
        """
        waiting = []
        begin_s = time.perf_counter()
        for result in results:
            try:
                waiting.append((result, self._commit_of(result)))
            except Exception as error:
                settle(result, error)
        failpoints.passing("trainer.commit")
        while waiting:
            answers = await self._ledger.finish_all([commit for _, commit in waiting])
            failpoints.passing("trainer.committed")
            without_room = []
            for (result, commit), answer in zip(waiting, answers, strict=True):
                run = result.slice.run
                if isinstance(answer, list):
                    _note_health(run, result.computed)
                    for outcome in commit.outcomes:
                        self._budgets.note_spent(run.project, outcome.used)
                    self._take(run, answer, commit.outcomes[-1].version)
                    self._note(run.name, result.computed)
                    settle(result, None)
                elif not isinstance(answer, Exception):
                    raise answer
                elif isinstance(answer, OutcomeUnknownError) and self._is_stopping:
                    settle(result, StoppedError())
                elif not isinstance(answer, _PASSING):
                    settle(result, answer)
                elif self._waits([run], answer):
                    without_room.append((result, commit))
                else:
                    settle(result, StoppedError())
            waiting = without_room
            if waiting:
                await asyncio.sleep(STORAGE_RETRY_S)
        COMMIT_SECONDS.observe(time.perf_counter() - begin_s)

    def _commit_of(self, result: SliceResult) -> Commit:
        run = result.slice.run
        # Before the commit, which adds the refused calls that follow.
        run.queue.set_accumulation(result.accumulation)
        return Commit(
            run=run.name, epoch=run.record.epoch, outcomes=self._outcomes(run, result.computed)
        )

    async def commit(
        self,
        run: LiveRun,
        outcomes: Sequence[OperationOutcome],
        *,
        checkpoints: Sequence[CheckpointRecord] = (),
        snapshots: Sequence[SnapshotRecord] = (),
    ) -> None:
        """Commit results of one run, with the rows that belong to them.

        Raises:
            FencedError: If another process holds the run.
            StoppedError: If the pod stops, or the run is deleted, while the disk is full.
        """
        failpoints.passing("trainer.commit")
        records = await self.durably(
            [run],
            lambda: self._ledger.finish(
                run.name,
                run.record.epoch,
                outcomes,
                checkpoints=checkpoints,
                snapshots=snapshots,
            ),
        )
        failpoints.passing("trainer.committed")
        self._take(run, records, outcomes[-1].version)

    async def durably(
        self,
        runs: Sequence[LiveRun],
        write: Callable[[], Awaitable[ResultT]],
        *,
        waits_for: tuple[type[TinsmithError], ...] = _PASSING,
    ) -> ResultT:
        """Write, again and again while it fails with certain errors.

        Args:
            runs: Runs that wait, and say so.
            write: Writes, or reads what is to be written; may be called again after it failed.
            waits_for: Errors that pass.

        Raises:
            StoppedError: If the pod stops meanwhile.
        """
        while True:
            try:
                result = await write()
            except waits_for as error:
                if not self._waits(runs, error):
                    raise StoppedError from error
                await asyncio.sleep(STORAGE_RETRY_S)
            except OutcomeUnknownError as error:
                # The next process finds out.
                if self._is_stopping:
                    raise StoppedError from error
                raise
            else:
                for run in runs:
                    run.unblock()
                return result

    def outcome(
        self,
        run: LiveRun,
        operation: QueuedOperation,
        version: int,
        *,
        result: bytes | None = None,
        error: TinsmithError | None = None,
        micro_batch_tokens: int | None = None,
        used: UsageAmounts = NOTHING,
    ) -> OperationOutcome:
        """Return what the ledger is to hold of an operation that ended."""
        return OperationOutcome(
            sequence_number=operation.sequence_number,
            result=result,
            error=None if error is None else self._wire.encode_error(error),
            version=version,
            plan=str(NumericsPlan(run.engine.info.fingerprint, micro_batch_tokens)),
            finish_time_s=time.time(),
            used=used,
        )

    def _outcomes(self, run: LiveRun, computed: Sequence[Computed]) -> list[OperationOutcome]:
        outcomes = []
        version = run.record.version
        for entry in computed:
            kind = Kind(entry.operation.record.kind)
            answer = entry.answer
            is_error = isinstance(answer, TinsmithError)
            OPERATION_SECONDS.labels(kind).observe(entry.duration_s)
            OPERATIONS.labels(kind, "failed" if is_error else "succeeded").inc()
            used = _used_by(entry)
            if isinstance(answer, TinsmithError):
                outcomes.append(
                    self.outcome(run, entry.operation, version, error=answer, used=used)
                )
                continue
            split = None
            if isinstance(answer, OptimStepResult):
                version = answer.version
            elif isinstance(answer, BatchResult):
                split = answer.micro_batch_tokens or None
                if isinstance(entry.operation.work, ForwardWork):
                    TRAINED_TOKENS.inc(entry.operation.num_tokens)
            result = self._wire.encode_result(kind, answer)
            outcomes.append(
                self.outcome(
                    run,
                    entry.operation,
                    version,
                    result=result,
                    micro_batch_tokens=split,
                    used=used,
                )
            )
        return outcomes

    def _take(self, run: LiveRun, records: list[OperationRecord], version: int) -> None:
        """Note what is durable, and wake the callers that wait."""
        run.unblock()
        run.queue.stop()
        run.commit_version(version)
        self._finish(run, records)

    def _waits(self, runs: Sequence[LiveRun], error: TinsmithError) -> bool:
        """Note why runs do not go on; return whether it is worth waiting."""
        if self._is_stopping or all(run.is_closed for run in runs):
            return False
        is_away = isinstance(error, StorageUnavailableError)
        for run in runs:
            run.block(error.message if is_away else f"the trainer's disk: {error.message}")
        logger.warning(
            "waiting for the object store" if is_away else "waiting for the disk",
            extra={"problem": error.message},
        )
        return True


def _used_by(entry: Computed) -> UsageAmounts:
    """Return what an operation is charged with: tokens if it succeeded, its time in any case."""
    work = entry.operation.work
    num_tokens = entry.operation.num_tokens if isinstance(entry.answer, BatchResult) else 0
    is_backward = isinstance(work, ForwardWork) and work.is_backward
    return UsageAmounts(
        num_trained_tokens=num_tokens if is_backward else 0,
        num_prefilled_tokens=0 if is_backward else num_tokens,
        engine_s=entry.duration_s,
    )


def _note_health(run: LiveRun, computed: Sequence[Computed]) -> None:
    """Tell the metrics by run of what is durable."""
    for entry in computed:
        answer, work = entry.answer, entry.operation.work
        error = answer if isinstance(answer, TinsmithError) else None
        RUN_HEALTH.note_end(run.name, error, engine_s=entry.duration_s)
        if isinstance(answer, OptimStepResult):
            RUN_HEALTH.note_step(run.name, answer.metrics, version=answer.version)
        elif isinstance(answer, BatchResult) and isinstance(work, ForwardWork) and work.is_backward:
            RUN_HEALTH.note_batch(
                run.name,
                answer.metrics,
                num_tokens=entry.operation.num_tokens,
                num_sequences=len(work.batch),
            )
