"""The cycle: takes what is ready of many runs, computes it together, and hands it to be stored.

One cycle is one base model's. The fair queue says how much of which runs; then there is one engine
call for all forwards and forward_backwards, and one for all optimizer steps. Its results are
committed while the next cycle computes. The runs of a committing cycle are not ready until their
results are on disk. So no operation ever builds on what may still be lost. What needs files rather
than the engine goes on beside the cycles, each run for itself: restores, saves, loads, snapshots.

A cycle of several passes does not hold the engine: another one, of other runs, may begin beside it
(`in_flight.py`), and their passes take turns.

An operation that was begun before, and so may be what killed the process, is counted durably first
and computed in a cycle alone.

A bug that ends a task of the cycle ends the service: a pod that answers and computes nothing is
worse than one that is restarted.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.cycle.committer import Committer
from tinsmith_trainer.cycle.in_flight import ComputedCycle, CyclesInFlight
from tinsmith_trainer.cycle.planner import CyclePlanner
from tinsmith_trainer.cycle.run_tasks import RunTasks
from tinsmith_trainer.execution.engine_calls import SliceResult, compute_slices, step_slices
from tinsmith_trainer.execution.operation_spans import CycleSpans
from tinsmith_trainer.execution.run_health import RUN_HEALTH
from tinsmith_trainer.execution.slices import Slice, is_suspect, step_behind
from tinsmith_trainer.metrics import (
    COMPUTED_TOKENS_PER_SECOND,
    CYCLE_RUNS,
    CYCLE_SECONDS,
    CYCLE_TOKENS,
    QUEUE_WAIT_SECONDS,
)
from tinsmith_trainer.ownership.lease import Lease
from tinsmith_trainer.ownership.run_registry import RunRegistry
from tinsmith_trainer.residency.manager import Residency
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import QueuedOperation

logger = logging.getLogger(__name__)


class Cycle:
    """Executes the operations of all runs, in order within each.

    Args:
        config: Limits.
        registry: The runs.
        residency: Which of them are in an engine.
        host: The engines.
        committer: Makes intents and results durable.
        run_tasks: What runs do beside the cycles.
        lease: Whether this process may compute.
        has_work: Set when a run may have something to do.
        on_end: Called when a task ends by a bug or because another process holds a run: this
            process must not go on as if it served.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: RunRegistry,
        residency: Residency,
        host: EngineHost,
        committer: Committer,
        run_tasks: RunTasks,
        lease: Lease,
        *,
        has_work: asyncio.Event,
        on_end: Callable[[Exception], None],
    ) -> None:
        self._config = config
        self._registry = registry
        self._residency = residency
        self._host = host
        self._committer = committer
        self._run_tasks = run_tasks
        self._lease = lease
        self._on_end = on_end
        self._planner = CyclePlanner(config.cycle_tokens, config.max_attempts, residency)
        self._has_work = has_work
        self._in_flight = CyclesInFlight(has_work.set)
        self._main: asyncio.Task[None] | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        """Work that a stop waits for: its results exist, so let them be committed."""
        self._restores: set[asyncio.Task[None]] = set()

    def start(self, *watchers: Coroutine[Any, Any, None]) -> None:
        """Begin to execute; what recovery found is first.

        Args:
            *watchers: Further tasks that live and die with the cycle.
        """
        self._has_work.set()
        self._main = self._spawn(self._execute_forever(), self._watchers)
        for watcher in watchers:
            self._spawn(watcher, self._watchers)

    async def stop(self) -> None:
        """End after the cycle that is being computed; what waits stays in the ledger."""
        self._committer.stop()
        for task in (*self._watchers, *self._restores):
            task.cancel()
        await asyncio.gather(*self._watchers, *self._restores, return_exceptions=True)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)

    def _spawn(
        self, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        group.add(task)
        task.add_done_callback(lambda done: self._note_end(done, group))
        return task

    def _note_end(self, task: asyncio.Task[None], group: set[asyncio.Task[None]]) -> None:
        group.discard(task)
        error = None if task.cancelled() else task.exception()
        if not isinstance(error, Exception):
            return
        if isinstance(error, FencedError):
            logger.critical("another process holds a run", extra={"problem": error.message})
        else:
            logger.critical("the cycle ended by a bug", exc_info=error)
        if self._main is not None:
            self._main.cancel()
        self._on_end(error)

    async def _execute_forever(self) -> None:
        while True:
            await self._lease.wait_current()
            self._has_work.clear()
            if not self._in_flight.let_another_begin:
                await self._has_work.wait()
                continue
            plan = self._planner.take(self._registry.runs, self._in_flight)
            # No lock is waited for: a run whose lock was held is not in the plan.
            for run in plan.to_restore:
                await run.lock.acquire()
                self._go_on(run, self._run_tasks.restore(run), self._restores)
            for aside in plan.aside:
                await aside.run.lock.acquire()
                self._go_on(aside.run, self._run_tasks.execute(aside), self._ending)
            for each in plan.slices:
                await each.run.lock.acquire()
            if plan.slices:
                cycle = self._in_flight.begin(plan.slices)
                # A stop does not end the cycle: what is computed is to be committed.
                task = self._spawn(self._execute(plan.slices, cycle), self._ending)
                task.add_done_callback(functools.partial(self._in_flight.note_end, cycle))
            elif not plan.aside and not plan.to_restore:
                if not self._in_flight:
                    failpoints.passing("trainer.idle")
                await self._has_work.wait()

    def _go_on(
        self, run: LiveRun, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]]
    ) -> None:
        """Let the work of a run go on beside the cycles; its lock, which is held, ends with it."""
        task = self._spawn(work, group)
        task.add_done_callback(lambda _: run.put_back())

    async def _execute(self, slices: Sequence[Slice], cycle: ComputedCycle) -> None:
        """Compute the slices of locked runs; their locks end with their commits."""
        results = [SliceResult(each, each.run.queue.accumulation) for each in slices]
        for each in slices:
            self._residency.touch(each.run)
            each.run.state.compute()
            each.run.queue.start(o.sequence_number for o in each.operations)
            _note_waits(each.run, each.operations)
        traced = CycleSpans((o for each in slices for o in each.operations), len(slices))
        intents = [
            asyncio.create_task(self._committer.begin([(s.run, s.operations) for s in slices]))
        ]
        try:
            if any(is_suspect(each.run, each.first) for each in slices):
                await intents[0]
            failpoints.passing("trainer.compute")
            await self._compute(results, intents, cycle, traced)
            failpoints.passing("trainer.computed")
        except Exception as error:
            traced.end(type(error).__name__)
            await asyncio.gather(*intents, return_exceptions=True)
            for run in (each.run for each in slices):
                undo = self._run_tasks.undo(run, error, is_alone=len(slices) == 1)
                self._go_on(run, undo, self._ending)
        else:
            self._spawn(self._commit(results, intents, traced), self._ending)

    async def _compute(
        self,
        results: Sequence[SliceResult],
        intents: list[asyncio.Task[None]],
        cycle: ComputedCycle,
        traced: CycleSpans,
    ) -> None:
        """Fill in the results; what joins on the way has its intent written as well."""
        begin_s = time.perf_counter()
        engine = results[0].slice.run.engine
        computation = compute_slices(engine, results)
        busy_s = await self._host.call_by_part(computation, cycle.note_pass)
        cycle.note_passed()
        joining = []
        for result in results:
            step = step_behind(result.slice.run, result.slice.operations[-1])
            if step is not None:
                result.slice.run.queue.start([step.sequence_number])
                _note_waits(result.slice.run, [step])
                traced.compute([step])
                joining.append((result, step))
        if joining:
            joined = [(result.slice.run, [step]) for result, step in joining]
            intents.append(asyncio.create_task(self._committer.begin(joined)))
            busy_s += await self._host.call(step_slices, engine, joining)
        self._measure(results, time.perf_counter() - begin_s, busy_s)

    def _measure(self, results: Sequence[SliceResult], duration_s: float, busy_s: float) -> None:
        num_tokens = sum(e.operation.num_tokens for result in results for e in result.computed)
        CYCLE_SECONDS.observe(duration_s)
        CYCLE_TOKENS.observe(num_tokens)
        CYCLE_RUNS.observe(len(results))
        self._registry.pace.note(num_tokens, busy_s)
        COMPUTED_TOKENS_PER_SECOND.set(self._registry.pace.tokens_per_s)

    async def _commit(
        self,
        results: Sequence[SliceResult],
        intents: Sequence[asyncio.Task[None]],
        traced: CycleSpans,
    ) -> None:
        """Make results durable while the next cycle computes, and let the runs go on."""
        traced.commit(entry.operation for result in results for entry in result.computed)

        def settle(result: SliceResult, error: Exception | None) -> None:
            problem = "" if error is None else type(error).__name__
            traced.note_committed((entry.operation for entry in result.computed), problem)
            self._settle(result, error)

        try:
            await asyncio.gather(*intents)
        except Exception as error:
            for result in results:
                settle(result, error)
        else:
            await self._committer.commit_computed(results, settle)
        finally:
            traced.end()

    def _settle(self, result: SliceResult, error: Exception | None) -> None:
        """Let a run go on after its commit, or undo what could not be committed."""
        run = result.slice.run
        if error is not None:
            self._go_on(run, self._run_tasks.undo(run, error, is_alone=True), self._ending)
            return
        run.state.commit(
            result.computed[-1].operation.sequence_number,
            duration_s=result.duration_s,
            is_step=result.is_boundary,
        )
        # An accumulation without end is cut as well, with its gradient in the snapshot.
        limit_s = self._config.snapshot_replay_s * (1 if result.is_boundary else 2)
        is_due = run.state.replay_cost_s >= limit_s and not run.state.is_being_saved
        if is_due and run.is_staying:
            run.state.begin_save()
            self._go_on(run, self._snapshot(run), self._ending)
        else:
            run.put_back()

    async def _snapshot(self, run: LiveRun) -> None:
        """Copy the state of a run, which then goes on while the copy is written."""
        try:
            copied = await self._residency.copy_state(run)
        except Exception as error:
            logger.warning("snapshot put off", extra={"run": run.name, "problem": str(error)})
            run.state.end_save()
        else:
            self._spawn(self._run_tasks.write_snapshot(run, copied), self._ending)


def _note_waits(run: LiveRun, operations: Sequence[QueuedOperation]) -> None:
    """Tell the metrics how long operations waited that are computed from now on."""
    now_s = time.time()
    for each in operations:
        # By the wall clock, which may have been set back.
        wait_s = max(0.0, now_s - each.record.submit_time_s)
        QUEUE_WAIT_SECONDS.labels(each.record.kind).observe(wait_s)
        RUN_HEALTH.note_wait(run.name, wait_s)
