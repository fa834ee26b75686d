"""The runs of a trainer: adoption, submission in order, and what clients wait for.

Submitting is the promise of this pod: validate, store, acknowledge. It never waits for the engine.
A request that is refused for good still consumes its number, as a failed operation, so that the
calls behind it are not held up by a number that will never arrive.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tinsmith_engine import AdapterConfig
from tinsmith_engine import codec as engine_codec
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import (
    CapacityExhaustedError,
    RunClosedError,
    RunNotFoundError,
    TinsmithError,
    UnavailableError,
)
from tinsmith_runtime.ledger import (
    Ledger,
    NewOperation,
    OperationRecord,
    OperationState,
    RunRecord,
)
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.storage import ObjectStore
from tinsmith_trainer.admission import Admission, Pace
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.live_run import LiveRun, QueuedOperation
from tinsmith_trainer.loading import RunLoader, load_of
from tinsmith_trainer.metrics import QUEUED_OPERATIONS
from tinsmith_trainer.payloads import write_payload
from tinsmith_trainer.residency import Residency
from tinsmith_trainer.waiting import Standing, standing_of
from tinsmith_trainer.work import Submission, WireCodec, Work

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class RunRegistry:
    """All runs that this trainer holds.

    Args:
        config: Limits.
        host: The engines.
        ledger: Where operations become durable.
        store: Where large requests and weights go.
        wire: The stored form of requests and results.
    """

    def __init__(
        self,
        config: TrainerConfig,
        host: EngineHost,
        ledger: Ledger,
        store: ObjectStore,
        wire: WireCodec,
    ) -> None:
        self._config = config
        self._host = host
        self._ledger = ledger
        self._store = store
        self._wire = wire
        self._runs: dict[str, LiveRun] = {}
        self.pace = Pace()
        self._admission = Admission(config, self.pace)
        self._loader = RunLoader(ledger, store, wire)
        self.residency = Residency(
            host,
            ledger,
            store,
            wire,
            self._runs.values(),
            max_resident_runs=config.max_resident_runs,
            max_parked_bytes=config.max_parked_bytes,
        )
        self._placement = asyncio.Lock()
        self._seen_through: set[asyncio.Task[Any]] = set()
        self.on_work: Callable[[], None] = lambda: None
        """Called when a run may have something to do: an operation was accepted, or it is free."""

    @property
    def runs(self) -> list[LiveRun]:
        """All runs, in the order of their adoption."""
        return list(self._runs.values())

    async def recover(self) -> None:
        """Read runs and their unfinished operations from the ledger, before anything is served."""
        for name in await self._ledger.list_deletions():
            await self._delete_files(name)
        for record in await self._ledger.list_runs():
            # What was published is written again on demand; readers hold it in memory.
            await asyncio.to_thread(self._store.delete_folder, f"{record.name}/published")
            if record.base_model not in self._host.engines:
                logger.warning(
                    "run waits for its base model, which this pod does not serve",
                    extra={"run": record.name, "base_model": record.base_model},
                )
                continue
            self._runs[record.name] = await self._load(record)

    async def adopt(self, name: str, base_model: str, adapter: AdapterConfig, epoch: int) -> int:
        """Take over a run, creating it if it is new; return its version.

        Raises:
            ModelNotFoundError: If this pod does not serve the base model.
            CapacityExhaustedError: If there is no place for another run.
            AbortedError: If a higher epoch holds the run.
        """
        return await self._see_through(self._adopt(name, base_model, adapter, epoch))

    async def _see_through(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Finish work whose caller may go away: what the ledger says and what is in memory agree.

        A cancelled call leaves the work running; its failure is then nobody's but the log's.
        """
        task = asyncio.create_task(work)
        self._seen_through.add(task)
        task.add_done_callback(self._note_end)
        return await asyncio.shield(task)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._seen_through.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("accepted work failed", extra={"problem": str(task.exception())})

    async def _adopt(self, name: str, base_model: str, adapter: AdapterConfig, epoch: int) -> int:
        # One at a time, and not beside a deletion: a repeated call must not meet a run half-made.
        async with self._placement:
            return await self._adopt_alone(name, base_model, adapter, epoch)

    async def _adopt_alone(
        self, name: str, base_model: str, adapter: AdapterConfig, epoch: int
    ) -> int:
        self._host.engine(base_model)
        if name not in self._runs and len(self._runs) >= self._config.max_runs:
            raise CapacityExhaustedError(
                f"the trainer holds {self._config.max_runs} runs; delete one", run=name
            )
        if name not in self._runs and name in await self._ledger.list_deletions():
            # Its files would be taken for those of the new run.
            await self._delete_files(name)
        record = await self._ledger.adopt_run(
            RunRecord(
                name=name,
                base_model=base_model,
                adapter=engine_codec.adapter_to_json(adapter),
                epoch=epoch,
            )
        )
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = await self._load(record)
            is_new = run.next_sequence_number == 1 and not run.queue
            async with run.lock:
                try:
                    await self.residency.ensure(run)
                except TinsmithError:
                    # A run that did something is kept: its next operation asks for a place again.
                    if is_new:
                        del self._runs[name]
                        await self._ledger.delete_run(name, epoch)
                    raise
        run.record = record
        return record.version

    async def _load(self, record: RunRecord) -> LiveRun:
        """Return a run as the ledger knows it, its unfinished operations queued."""
        run = LiveRun(
            record, self._host.engine(record.base_model), on_free=lambda: self._note_free(run)
        )
        await self._loader.load(run)
        for queued in run.queue.values():
            self._admission.count(run, queued.load)
        QUEUED_OPERATIONS.inc(len(run.queue))
        return run

    async def release(self, name: str, epoch: int, *, delete: bool) -> None:
        """Park or delete a run.

        Raises:
            RunNotFoundError: If this pod does not hold it.
            FencedError: If a higher epoch holds it.
        """
        await self._see_through(self._release(name, epoch, delete=delete))

    async def _release(self, name: str, epoch: int, *, delete: bool) -> None:
        run = self.get(name)
        if epoch != run.record.epoch:
            raise FencedError(
                f"run {name} is held under epoch {run.record.epoch}, not {epoch}", run=name
            )
        if not delete:
            if run.queue:
                # It is about to be used, and may hold its lock while it waits for a place.
                return
            async with run.lock:
                if not run.queue and not run.running:
                    await self.residency.park(run)
            return
        async with self._placement:
            await self._delete(run, epoch)

    async def _delete(self, run: LiveRun, epoch: int) -> None:
        run.is_closed = True
        run.notify()
        self._note_free(run)
        async with run.lock:
            try:
                await self._ledger.delete_run(run.name, epoch)
            except TinsmithError:
                known = {record.name for record in await self._ledger.list_runs()}
                if run.name in known:
                    run.is_closed = False
                    self.on_work()
                    raise
                # An earlier call deleted the rows and did not come to the rest.
            self._runs.pop(run.name, None)
            QUEUED_OPERATIONS.dec(len(run.queue))
            for queued in run.queue.values():
                self._admission.release(run, queued.load)
            await self.residency.evict(run)
            await self._delete_files(run.name)

    async def _delete_files(self, name: str) -> None:
        """Remove what a deleted run left in the store; the ledger remembers it until then."""
        await asyncio.to_thread(self._store.delete_folder, name)
        await self._ledger.forget_deletion(name)

    def _note_free(self, run: LiveRun) -> None:
        self.residency.note_free(run)
        self.on_work()

    def find(self, name: str) -> LiveRun | None:
        """Return a run, or None if this pod does not hold it."""
        return self._runs.get(name)

    def get(self, name: str) -> LiveRun:
        """Return a run.

        Raises:
            RunNotFoundError: If this pod does not hold it.
        """
        run = self._runs.get(name)
        if run is None:
            raise run_not_found(name)
        return run

    def standing(self, run: LiveRun, sequence_number: int) -> Standing:
        """Return how an operation of a run stands, and what it waits for."""
        return standing_of(
            run, sequence_number, self._runs.values(), cycle_tokens=self._config.cycle_tokens
        )

    async def submit(self, submission: Submission, work: Work) -> OperationRecord:
        """Make an operation durable and queue it; a repeated request returns its operation.

        Raises:
            TinsmithError: If it is refused; see `TrainerService`.
        """
        return await self._see_through(self._submit(submission, work))

    async def _submit(self, submission: Submission, work: Work) -> OperationRecord:
        run = self.get(submission.run)
        if run.is_closed:
            raise RunClosedError(f"{run.name} was deleted; create a new run", run=run.name)
        load = load_of(work, len(submission.payload))
        self._admission.admit(run, submission.sequence_number, load)
        try:
            operation = await self._new_operation(submission)
            record = await self._ledger.submit(operation)
        except BaseException:
            self._admission.release(run, load)
            raise
        is_new = (
            record.state is OperationState.PENDING
            and record.sequence_number not in run.queue
            and record.sequence_number >= run.next_sequence_number
            and self._runs.get(run.name) is run
        )
        if is_new:
            self._enqueue(run, QueuedOperation(record, work, load))
            self.on_work()
        else:
            self._admission.release(run, load)
        return record

    async def refuse(self, submission: Submission, error: TinsmithError) -> None:
        """Consume the number of a request that can never be accepted."""
        await self._see_through(self._refuse(submission, error))

    async def _refuse(self, submission: Submission, error: TinsmithError) -> None:
        run = self.get(submission.run)
        operation = await self._new_operation(submission, keep_payload=False)
        record = await self._ledger.refuse(operation, self._wire.encode_error(error))
        if record is not None:
            run.consume(record)
            self.on_work()

    def finish(self, run: LiveRun, records: list[OperationRecord]) -> None:
        """Take finished operations out of the queue, and tell who waits."""
        for record in records:
            queued = run.queue.get(record.sequence_number)
            if queued is not None:
                self._admission.release(run, queued.load)
                QUEUED_OPERATIONS.dec()
        run.finish(records)

    async def park_all(self) -> None:
        """Snapshot what changed since the last snapshot, so that a restart need not replay."""
        for run in self.runs:
            async with run.lock:
                try:
                    await self.residency.park(run)
                except TinsmithError as error:
                    logger.warning(
                        "not parked; the ledger has everything",
                        extra={"run": run.name, "problem": error.message},
                    )

    def _enqueue(self, run: LiveRun, operation: QueuedOperation) -> None:
        QUEUED_OPERATIONS.inc()
        run.accept(operation)

    async def _new_operation(
        self, submission: Submission, *, keep_payload: bool = True
    ) -> NewOperation:
        payload, path = None, None
        if keep_payload:
            payload, path = await write_payload(self._store, submission)
        return NewOperation(
            run=submission.run,
            sequence_number=submission.sequence_number,
            kind=submission.kind,
            request_id=submission.request_id,
            digest=submission.digest,
            payload=payload,
            payload_path=path,
            submit_time_s=time.time(),
        )


def run_not_found(name: str) -> RunNotFoundError:
    """Return the error for a run that does not exist, or belongs to somebody else."""
    return RunNotFoundError(
        f"run {name} does not exist in your project; list runs to see their names", run=name
    )


def is_final(error: TinsmithError) -> bool:
    """Whether a refused request can never succeed, so that its number counts as consumed."""
    return error.retry_after_s is None and not isinstance(error, UnavailableError)
