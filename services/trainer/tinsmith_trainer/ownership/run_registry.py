"""The runs of a trainer: submission in order, and what clients wait for.

Submitting is the promise of this pod: validate, store, acknowledge. It never waits for the engine.
A request that is refused for good still consumes its number, as a failed operation. The calls
behind it would else be held up by a number that never arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import (
    OutcomeUnknownError,
    RunClosedError,
    RunMovedError,
    RunNotFoundError,
    TinsmithError,
    UnavailableError,
)
from tinsmith_runtime.ledger import (
    Ledger,
    NewOperation,
    OperationRecord,
    OperationState,
)
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.shielded import see_through
from tinsmith_runtime.storage import ObjectStore
from tinsmith_runtime.usage import BudgetGate
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.execution.operation_spans import begin_operation
from tinsmith_trainer.execution.operation_status import OperationStatus, status_of
from tinsmith_trainer.execution.run_health import RUN_HEALTH
from tinsmith_trainer.metrics import QUEUED_OPERATIONS
from tinsmith_trainer.runs.ledger_loader import size_of
from tinsmith_trainer.runs.operations import Submission, WireCodec, Work, used_by
from tinsmith_trainer.runs.queue_limits import Pace, QueueAdmission
from tinsmith_trainer.runs.request_payloads import write_payload
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import QueuedOperation

ResultT = TypeVar("ResultT")


class RunRegistry:
    """The runs that this trainer holds and that are in use; others sleep in the ledger.

    Args:
        config: Limits.
        runs: The runs by name, which only the registry adds and removes; empty at first.
        ledger: Where operations become durable.
        store: Where large requests and weights go.
        wire: The stored form of requests and results.
        has_work: Set when a run may have something to do, as when an operation was accepted.
        obstacle: Says what keeps the whole trainer from going on; empty if nothing does.
        on_fenced: Called when a write finds that another process holds a run.
        budgets: Refuses what a project has no budget left for.
    """

    def __init__(
        self,
        config: TrainerConfig,
        runs: dict[str, LiveRun],
        ledger: Ledger,
        store: ObjectStore,
        wire: WireCodec,
        *,
        has_work: asyncio.Event,
        obstacle: Callable[[], str],
        on_fenced: Callable[[FencedError], None],
        budgets: BudgetGate,
    ) -> None:
        self._budgets = budgets
        self._config = config
        self._ledger = ledger
        self._store = store
        self._wire = wire
        self._runs = runs
        self._has_work = has_work
        self._obstacle = obstacle
        self._on_fenced = on_fenced
        self.pace = Pace()
        self._admission = QueueAdmission(config, self.pace)
        self._wakes: Callable[[str], Awaitable[LiveRun | None]] | None = None
        self._rests: Callable[[LiveRun], Awaitable[None]] | None = None
        self.num_submits = 0
        """Calls that asked for an operation so far."""

    @property
    def runs(self) -> list[LiveRun]:
        """All runs, in the order of their adoption."""
        return list(self._runs.values())

    def add(self, run: LiveRun) -> None:
        """Take in a run as the ledger knows it, its unfinished operations queued."""
        self._runs[run.name] = run
        for queued in run.queue.values():
            self._admission.count(run, queued.size)
        QUEUED_OPERATIONS.inc(len(run.queue))

    def remove(self, run: LiveRun) -> None:
        """Let a run go; what it has queued counts no more."""
        if self._runs.get(run.name) is not run:
            return
        del self._runs[run.name]
        RUN_HEALTH.forget(run.name)
        QUEUED_OPERATIONS.dec(len(run.queue))
        for queued in run.queue.values():
            self._admission.release(run, queued.size)

    def held(self, name: str) -> LiveRun | None:
        """Return a run that is in use here, or None."""
        return self._runs.get(name)

    def wake_by(
        self,
        wakes: Callable[[str], Awaitable[LiveRun | None]],
        rests: Callable[[LiveRun], Awaitable[None]],
    ) -> None:
        """Say what takes in a run that sleeps, and what lets one sleep again."""
        self._wakes = wakes
        self._rests = rests

    async def wake(self, name: str) -> LiveRun | None:
        """Return a run, taken in again if it slept; None if this trainer does not hold it."""
        run = self._runs.get(name)
        if run is None and self._wakes is not None:
            run = await self._wakes(name)
        if run is not None:
            run.note_asked()
        return run

    async def rest(self, run: LiveRun) -> None:
        """Let a run sleep again that was woken for a chore, if it is at rest."""
        if self._rests is not None:
            await self._rests(run)

    async def get(self, name: str) -> LiveRun:
        """Return a run.

        Raises:
            RunNotFoundError: If this pod does not hold it.
        """
        run = await self.wake(name)
        if run is None:
            raise run_not_found(name)
        return run

    async def find(self, name: str) -> LiveRun:
        """Return a run that a client asks for.

        Raises:
            RunMovedError: If another trainer holds it, or is to.
            RunNotFoundError: If there is none of this name.
        """
        run = await self.wake(name)
        if run is not None:
            return run
        if self._ledger.is_shared and await self._ledger.is_known(name):
            raise run_moved(name)
        raise run_not_found(name)

    async def require_known(self, name: str) -> None:
        """Raise `RunNotFoundError` unless there is a run of this name, held here or elsewhere."""
        if name not in self._runs and not await self._ledger.is_known(name):
            raise run_not_found(name)

    async def set_history(self, name: str, epoch: int, history_retention_s: float) -> None:
        """Set how long the past of a run is kept that is held here, elsewhere, or by none.

        Raises:
            RunNotFoundError: If there is none of this name.
            FencedError: If it is held under another epoch.
        """
        await self.require_known(name)
        await self._ledger.set_history(name, epoch, history_retention_s)

    def status(
        self, run: LiveRun, sequence_number: int, *, looks_around: bool = True
    ) -> OperationStatus:
        """Return the status of an operation of a run, and what it waits for."""
        return status_of(
            run,
            sequence_number,
            self._runs.values(),
            cycle_tokens=self._config.cycle_tokens,
            obstacle=self._obstacle(),
            looks_around=looks_around,
        )

    async def submit(
        self, submission: Submission, work: Work, *, timeout_s: float | None = None
    ) -> OperationRecord:
        """Make an operation durable and queue it; a repeated request returns its operation.

        Args:
            submission: The request.
            work: What it asks for.
            timeout_s: How long its caller waits. What is under way then goes on without it.

        Raises:
            OutcomeUnknownError: If the ledger did not answer in that time.
            TinsmithError: If it is refused; see `TrainerService`.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await see_through(self._submit(submission, work))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise OutcomeUnknownError(
                f"the ledger did not say in time whether {submission.run} has operation "
                f"{submission.sequence_number}; send the same request again",
                run=submission.run,
                sequence_number=submission.sequence_number,
            ) from error

    async def _submit(self, submission: Submission, work: Work) -> OperationRecord:
        run = await self.find(submission.run)
        self.num_submits += 1
        async with run.gate.passing():
            return await self._accept(run, submission, work)

    async def _accept(self, run: LiveRun, submission: Submission, work: Work) -> OperationRecord:
        if run.is_leaving:
            raise run_moved(run.name)
        if run.is_closed:
            raise RunClosedError(f"{run.name} was deleted; create a new run", run=run.name)
        waiting = self._admission.waiting(run.project)
        self._budgets.require(run.project, used_by(work), waiting.of)
        size = size_of(work, len(submission.payload))
        self._admission.admit(run, submission.sequence_number, size)
        try:
            operation = await self._new_operation(run, submission)
            failpoints.passing("trainer.submit")
            record = await self._ledger.submit(operation)
            failpoints.passing("trainer.submitted")
        except FencedError as error:
            self._admission.release(run, size)
            self._note_fenced(run, error)
            raise run_moved(run.name) from error
        except BaseException:
            self._admission.release(run, size)
            raise
        is_new = (
            record.state is OperationState.PENDING
            and record.sequence_number not in run.queue
            and record.sequence_number >= run.queue.next_sequence_number
            and self._runs.get(run.name) is run
        )
        if is_new:
            span = begin_operation(submission, record.submit_time_s)
            self._enqueue(run, QueuedOperation(record, work, size, span))
            self._has_work.set()
        else:
            self._admission.release(run, size)
        return record

    async def refuse(self, submission: Submission, error: TinsmithError) -> None:
        """Consume the number of a request that can never be accepted.

        Raises:
            QueueFullError: If the number is too far ahead to be kept; it was not consumed.
        """
        await see_through(self._refuse(submission, error))

    async def resume(self, run: LiveRun) -> None:
        """Note that the client of a run is gone; numbers that it did not deliver are given up."""
        # What it sent last may be on its way into the ledger.
        async with run.gate.closed():
            run.queue.note_client_gone()

    async def _refuse(self, submission: Submission, error: TinsmithError) -> None:
        run = await self.find(submission.run)
        async with run.gate.passing():
            await self._consume(run, submission, error)

    async def _consume(self, run: LiveRun, submission: Submission, error: TinsmithError) -> None:
        self._admission.check_distance(run, submission.sequence_number)
        operation = await self._new_operation(run, submission, keep_payload=False)
        try:
            record = await self._ledger.refuse(operation, self._wire.encode_error(error))
        except FencedError as fenced:
            self._note_fenced(run, fenced)
            raise run_moved(run.name) from fenced
        if record is not None:
            run.queue.consume(record)
            self._has_work.set()

    def finish(self, run: LiveRun, records: list[OperationRecord]) -> None:
        """Take finished operations out of the queue, and wake the callers that wait."""
        for record in records:
            queued = run.queue.get(record.sequence_number)
            if queued is not None:
                self._admission.release(run, queued.size)
                QUEUED_OPERATIONS.dec()
        run.queue.finish(records)

    def _note_fenced(self, run: LiveRun, error: FencedError) -> None:
        """Tell that a run was taken, unless it was given up while the request was on its way."""
        if self._runs.get(run.name) is run and run.is_staying:
            self._on_fenced(error)

    def _enqueue(self, run: LiveRun, operation: QueuedOperation) -> None:
        QUEUED_OPERATIONS.inc()
        run.queue.accept(operation)

    async def _new_operation(
        self, run: LiveRun, submission: Submission, *, keep_payload: bool = True
    ) -> NewOperation:
        payload, path = None, None
        if keep_payload:
            payload, path = await write_payload(self._store, submission)
        return NewOperation(
            run=submission.run,
            epoch=run.record.epoch,
            sequence_number=submission.sequence_number,
            kind=submission.kind,
            request_id=submission.request_id,
            digest=submission.digest,
            payload=payload,
            payload_path=path,
            submit_time_s=time.time(),
            seen_through=run.queue.seen_through(submission.sequence_number),
            key_id=submission.key_id,
        )


def run_not_found(name: str) -> RunNotFoundError:
    """Return the error for a run that does not exist, or belongs to another project."""
    return RunNotFoundError(
        f"run {name} does not exist in your project; list runs to see their names", run=name
    )


def run_moved(name: str) -> RunMovedError:
    """Return the error for a run that this trainer does not hold, or gives up."""
    return RunMovedError(
        f"run {name} is held by another trainer, or about to be; ask the scheduler where it is and "
        "send the request again",
        run=name,
    )


def is_final(error: TinsmithError) -> bool:
    """Whether a refused request can never succeed, so that its number counts as consumed."""
    return error.retry_after_s is None and not isinstance(error, UnavailableError)
