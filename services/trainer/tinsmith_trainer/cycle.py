"""The cycle: takes what is ready, computes it, commits the results, wakes who waits.

One slice at a time: the consecutive operations of one run up to its next optimizer step. Runs
take turns. The intent of a slice is written while it computes; an operation that was begun before,
and so may be what killed the process, is counted durably first and computed alone. Nothing is told
to anybody before its result is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import (
    CapacityExhaustedError,
    PoisonOperationError,
    SequenceGapError,
    StorageBusyError,
    StorageFullError,
    TinsmithError,
)
from tinsmith_runtime.ledger import CheckpointRecord, Ledger, Outcome, SnapshotRecord
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.status import internal_error
from tinsmith_trainer.checkpoints import CheckpointRegistry
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.executor import Computed, SliceResult, compute_slice
from tinsmith_trainer.live_run import LiveRun, QueuedOperation
from tinsmith_trainer.metrics import OPERATION_SECONDS, OPERATIONS, TRAINED_TOKENS
from tinsmith_trainer.registry import RunRegistry
from tinsmith_trainer.work import (
    ForwardWork,
    Kind,
    LoadCheckpointWork,
    LoadResult,
    OptimStepWork,
    SaveCheckpointWork,
    WireCodec,
)

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_STORAGE_RETRY_S = 0.5
_CAPACITY_RETRY_S = 0.2
_GAP_CHECK_S = 0.25
_MAX_SLICE_TOKENS = 65_536


class _StoppedError(Exception):
    """The pod stops while a write waits for space; what is in the ledger is done again later."""


class Cycle:
    """Executes the operations of all runs, in order within each.

    Args:
        config: Limits.
        registry: The runs.
        checkpoints: Saves and loads.
        host: The engines.
        ledger: Where results become durable.
        wire: The stored form of results.
        on_fenced: Called when another process holds a run: this one must stop.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: RunRegistry,
        checkpoints: CheckpointRegistry,
        host: EngineHost,
        ledger: Ledger,
        wire: WireCodec,
        *,
        on_fenced: Callable[[FencedError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._registry = registry
        self._checkpoints = checkpoints
        self._host = host
        self._ledger = ledger
        self._wire = wire
        self._on_fenced = on_fenced
        self._clock = clock
        self._has_work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_run = ""
        self._is_stopping = False
        registry.on_work = self._has_work.set

    def start(self) -> None:
        """Begin to execute; what recovery found is first."""
        self._has_work.set()
        for work in (self._execute_forever(), self._watch_gaps()):
            self._tasks.add(asyncio.create_task(work))

    async def stop(self) -> None:
        """End after the slice that is being computed; what waits stays in the ledger."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _execute_forever(self) -> None:
        while True:
            run = self._next_run()
            if run is None:
                failpoints.passing("trainer.idle")
                self._has_work.clear()
                if self._next_run() is None:
                    await self._has_work.wait()
                continue
            slice_task = asyncio.create_task(self._execute_one(run))
            try:
                # A stop waits for the slice: its result is computed, so let it be committed.
                await asyncio.shield(slice_task)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):
                    await slice_task
                raise
            except FencedError:
                raise
            except Exception:
                # The operations are still queued: nothing of the slice was told to anybody.
                logger.exception("slice not ended; tried again", extra={"run": run.name})
                await asyncio.sleep(_STORAGE_RETRY_S)

    def _next_run(self) -> LiveRun | None:
        """Return the run whose turn it is: the first that is ready after the one served last."""
        ready = sorted((run for run in self._registry.runs if run.is_ready), key=lambda r: r.name)
        if not ready:
            return None
        run = next((run for run in ready if run.name > self._last_run), ready[0])
        self._last_run = run.name
        return run

    async def _execute_one(self, run: LiveRun) -> None:
        async with run.lock:
            if not run.is_ready:
                return
            operations = run.next_slice(max_tokens=_MAX_SLICE_TOKENS)
            suspect = next((o for o in operations if o.record.num_attempts > 0), None)
            if suspect is not None:
                before = operations[: operations.index(suspect)]
                operations = before or [suspect]
            run.running = frozenset(operation.sequence_number for operation in operations)
            try:
                await self._execute_or_fail(run, operations)
            except FencedError as error:
                logger.critical("another process holds the run", extra={"run": run.name})
                self._on_fenced(error)
                raise
            except _StoppedError:
                # What was computed is not committed: the engine is ahead of the ledger.
                await self._registry.residency.evict(run)
            finally:
                run.running = frozenset()
                run.obstacle = ""

    async def _execute_or_fail(self, run: LiveRun, operations: Sequence[QueuedOperation]) -> None:
        try:
            await self._execute(run, operations)
        except (FencedError, _StoppedError):
            raise
        except CapacityExhaustedError:
            run.obstacle = "a place in the engine; all are taken by busy runs"
            await asyncio.sleep(_CAPACITY_RETRY_S)
        except TinsmithError as error:
            await self._fail(run, operations, error)
        except Exception:
            logger.exception("slice failed by a bug", extra={"run": run.name})
            await self._registry.residency.evict(run)
            # What was committed before the bug has its result.
            left = [each for each in operations if each.sequence_number in run.queue]
            if left:
                await self._fail(run, left, internal_error())

    async def _execute(self, run: LiveRun, operations: Sequence[QueuedOperation]) -> None:
        first = operations[0]
        if first.record.num_attempts >= self._config.max_attempts:
            error = PoisonOperationError(
                f"the trainer died {first.record.num_attempts} times while it ran operation "
                f"{first.sequence_number} of {run.name}; it is not tried again, change the request",
                run=run.name,
                sequence_number=first.sequence_number,
            )
            await self._fail(run, operations, error)
            return
        await self._registry.residency.ensure(run)
        match first.work:
            case SaveCheckpointWork():
                await self._save(run, first, first.work)
            case LoadCheckpointWork():
                await self._load(run, first, first.work)
            case _:
                await self._compute(run, operations)

    async def _compute(self, run: LiveRun, operations: Sequence[QueuedOperation]) -> None:
        done: list[tuple[QueuedOperation, Computed]] = []
        failures: Sequence[int] = run.failures
        part = list(operations)
        while part:
            result = await self._compute_part(run, part, failures)
            done += zip(part, result.computed, strict=False)
            failures = result.failures
            part = [] if result.is_state_lost else self._step_behind(run, part[-1])
        if result.is_state_lost:
            await self._registry.residency.evict(run)
        # Before the commit, which adds the refused calls that follow.
        run.failures = result.failures
        outcomes = [self._computed_outcome(run, operation, entry) for operation, entry in done]
        await self._commit(run, outcomes)
        is_boundary = isinstance(done[-1][0].work, OptimStepWork)
        run.weights_serial += is_boundary
        run.state_sequence_number = outcomes[-1].sequence_number
        run.replay_cost_s += sum(entry.duration_s for _, entry in done)
        await self._snapshot_if_due(run, is_boundary=is_boundary)

    async def _compute_part(
        self, run: LiveRun, operations: Sequence[QueuedOperation], failures: Sequence[int]
    ) -> SliceResult:
        """Compute operations on the engine while their intent is written."""
        numbers = [operation.sequence_number for operation in operations]
        run.running |= set(numbers)
        intent = asyncio.create_task(
            self._durably(run, lambda: self._ledger.start(run.name, numbers))
        )
        if operations[0].record.num_attempts > 0:
            await intent
        failpoints.passing("trainer.compute")
        result = await self._host.call(
            compute_slice,
            run.engine,
            run.name,
            [(operation.sequence_number, operation.work) for operation in operations],
            failures,
        )
        await intent
        return result

    def _step_behind(self, run: LiveRun, last: QueuedOperation) -> list[QueuedOperation]:
        """Return the optimizer step that arrived while the gradient before it was computed.

        It joins the slice, so that a gradient and its step share one commit however they arrive.
        """
        behind = run.queue.get(last.sequence_number + 1)
        is_step = (
            behind is not None
            and isinstance(last.work, ForwardWork)
            and isinstance(behind.work, OptimStepWork)
            and behind.record.num_attempts == 0
        )
        return [behind] if behind is not None and is_step else []

    def _computed_outcome(
        self, run: LiveRun, operation: QueuedOperation, entry: Computed
    ) -> Outcome:
        kind = Kind(operation.record.kind)
        result = entry.result
        OPERATION_SECONDS.labels(kind).observe(entry.duration_s)
        OPERATIONS.labels(kind, "failed" if result is None else "succeeded").inc()
        if isinstance(operation.work, ForwardWork) and result is not None:
            TRAINED_TOKENS.inc(operation.work.num_tokens)
        return self._outcome(
            run,
            operation,
            entry.version or run.record.version,
            result=None if result is None else self._wire.encode_result(kind, result),
            error=entry.error,
        )

    async def _snapshot_if_due(self, run: LiveRun, *, is_boundary: bool) -> None:
        # An accumulation without end is cut as well, with its gradient in the snapshot.
        limit_s = self._config.snapshot_replay_s * (1 if is_boundary else 2)
        if not run.is_resident or run.replay_cost_s < limit_s:
            return
        try:
            await self._registry.residency.snapshot(run)
        except FencedError:
            raise
        except Exception as error:
            # The results are committed: a snapshot is an economy, and is tried again later.
            logger.warning("snapshot put off", extra={"run": run.name, "problem": str(error)})
            run.replay_cost_s = 0.0

    async def _save(
        self, run: LiveRun, operation: QueuedOperation, work: SaveCheckpointWork
    ) -> None:
        await self._durably(run, lambda: self._ledger.start(run.name, [operation.sequence_number]))
        record = await self._checkpoints.save(run, work, operation.sequence_number)
        result = self._wire.encode_result(Kind.SAVE_CHECKPOINT, record)
        outcome = self._outcome(run, operation, record.version, result=result)
        await self._commit(run, [outcome], checkpoints=[record])
        run.state_sequence_number = operation.sequence_number

    async def _load(
        self, run: LiveRun, operation: QueuedOperation, work: LoadCheckpointWork
    ) -> None:
        number = operation.sequence_number
        await self._durably(run, lambda: self._ledger.start(run.name, [number]))
        version, state = await self._checkpoints.load(run, work)
        # A replay must not depend on a checkpoint that its owner may delete: the loaded state is
        # saved with the operation itself.
        snapshot = await self._durably(
            run, lambda: self._registry.residency.write_snapshot(run, state, number, [])
        )
        result = self._wire.encode_result(Kind.LOAD_CHECKPOINT, LoadResult(version))
        outcome = self._outcome(run, operation, version, result=result)
        run.failures = []
        await self._commit(run, [outcome], snapshots=[snapshot])
        run.weights_serial += 1
        run.state_sequence_number = number
        run.replay_cost_s = 0.0

    async def _fail(
        self, run: LiveRun, operations: Sequence[QueuedOperation], error: TinsmithError
    ) -> None:
        """End the first of operations that could not be begun; leave the others in the queue."""
        first = operations[0]
        OPERATIONS.labels(first.record.kind, "failed").inc()
        outcome = self._outcome(run, first, run.record.version, error=error)
        if isinstance(first.work, ForwardWork) and first.work.is_backward:
            run.failures.append(first.sequence_number)
        elif isinstance(first.work, OptimStepWork):
            run.failures = []
        await self._commit(run, [outcome])
        if isinstance(first.work, OptimStepWork):
            # Replay clears the gradient of a failed step; a resident run must agree with it.
            await self._registry.residency.evict(run)
        if run.is_resident:
            run.state_sequence_number = first.sequence_number

    def _outcome(
        self,
        run: LiveRun,
        operation: QueuedOperation,
        version: int,
        *,
        result: bytes | None = None,
        error: TinsmithError | None = None,
    ) -> Outcome:
        return Outcome(
            sequence_number=operation.sequence_number,
            result=result,
            error=None if error is None else self._wire.encode_error(error),
            version=version,
            plan=run.engine.info.fingerprint,
            finish_time_s=time.time(),
        )

    async def _commit(
        self,
        run: LiveRun,
        outcomes: Sequence[Outcome],
        *,
        checkpoints: Sequence[CheckpointRecord] = (),
        snapshots: Sequence[SnapshotRecord] = (),
    ) -> None:
        if run.is_closed:
            return
        failpoints.passing("trainer.commit")
        records = await self._durably(
            run,
            lambda: self._ledger.finish(
                run.name,
                run.record.epoch,
                outcomes,
                checkpoints=checkpoints,
                snapshots=snapshots,
            ),
        )
        failpoints.passing("trainer.committed")
        run.running = frozenset()
        run.record = dataclasses.replace(run.record, version=outcomes[-1].version)
        self._registry.finish(run, records)

    async def _durably(self, run: LiveRun, write: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Write, waiting for space if the disk is full: what was acknowledged is not given up."""
        while True:
            try:
                result = await write()
            except (StorageFullError, StorageBusyError) as error:
                if self._is_stopping:
                    raise _StoppedError from error
                run.obstacle = f"the trainer's disk: {error.message}"
                logger.warning("waiting for the disk", extra={"problem": error.message})
                await asyncio.sleep(_STORAGE_RETRY_S)
            else:
                run.obstacle = ""
                return result

    async def _watch_gaps(self) -> None:
        while True:
            await asyncio.sleep(min(_GAP_CHECK_S, self._config.gap_timeout_s / 4))
            for run in self._registry.runs:
                try:
                    await self._expire_gap(run)
                except FencedError as error:
                    logger.critical("another process holds the run", extra={"run": run.name})
                    self._on_fenced(error)
                    raise
                except Exception:
                    logger.exception("gap not closed", extra={"run": run.name})

    async def _expire_gap(self, run: LiveRun) -> None:
        """Fail the operations of a run that waited too long for a number."""
        missing = run.missing_numbers()
        if not missing:
            run.held_since_s = None
            return
        if run.held_since_s is None:
            run.held_since_s = self._clock()
        if self._clock() - run.held_since_s < self._config.gap_timeout_s:
            return
        async with run.lock:
            missing = run.missing_numbers()
            if not missing or run.is_closed:
                return
            error = SequenceGapError(
                f"sequence number {missing[0]} of {run.name} did not arrive within "
                f"{self._config.gap_timeout_s:g} s; the operations that waited for it failed, go "
                f"on with number {max(run.queue) + 1}",
                run=run.name,
                missing=missing[0],
            )
            held = [run.queue[number] for number in sorted(run.queue)]
            given_up = await self._ledger.give_up(
                run.name, run.record.epoch, missing, self._wire.encode_error(error)
            )
            if given_up != missing:
                # One arrived at the last moment: the others are lost, what waited goes on.
                run.give_up(given_up)
                run.held_since_s = None
                self._has_work.set()
                return
            outcomes = [
                self._outcome(run, operation, run.record.version, error=error) for operation in held
            ]
            await self._commit(run, outcomes)
            run.give_up(missing)
            # What these failures mean for the accumulation is worked out by the replay.
            await self._registry.residency.evict(run)
            run.held_since_s = None
