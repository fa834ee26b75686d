"""Migration: a run whose trainer process is gone is placed anew, on the same ledger.

A process is gone if another one registered under its name, if it unregistered, or if its heartbeat
stopped. That is a guess and decides nothing. The ledger gives a run to another trainer once the
earlier lease has ended by the database's clock. The raised epoch keeps a process that is alive
after all from writing. A wrong guess costs time, never a result.

A migration does not fail: the run waits until there is a trainer, and its status says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.metrics import MOVED_RUNS, MOVING_RUNS
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.runs.placement_attempts import Adoptions, TrainerFullError
from tinsmith_scheduler.store.records import Run
from tinsmith_scheduler.workers.placement import Wait
from tinsmith_scheduler.workers.workers import Workers

logger = logging.getLogger(__name__)

_MAX_CONCURRENT = 16


class Moves:
    """The runs that are on their way to another trainer.

    Args:
        database: Where runs are kept.
        workers: The workers that are registered.
        adoptions: Chooses trainers and asks them.
        interval_s: How often to look for processes that are gone.
        retry_s: Pause between two tries to place a run.
    """

    def __init__(
        self,
        database: Database,
        *,
        workers: Workers,
        adoptions: Adoptions,
        interval_s: float,
        retry_s: float,
    ) -> None:
        self._database = database
        self._workers = workers
        self._adoptions = adoptions
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiting_for: dict[str, str] = {}
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._look = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on with what a previous process left unfinished, and watch from now on."""
        for run in await self._database.read(run_store.list_moving):
            self._begin(run)
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """End all tasks; what is unfinished goes on after the restart."""
        tasks = [*self._tasks.values(), *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Look at once: a worker came or went."""
        self._look.set()

    def waiting_for(self, run: str) -> str:
        """Return what a move waits for, in words."""
        return self._waiting_for.get(run, "the scheduler to choose a trainer")

    async def _watch(self) -> None:
        while True:
            self._look.clear()
            try:
                await self._find_lost()
            except Exception:
                logger.exception("a look for lost trainers failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._look.wait()

    async def _find_lost(self) -> None:
        for worker, incarnation in await self._database.read(run_store.list_holders):
            if not self._workers.is_lost(worker, incarnation):
                continue
            failpoints.passing("scheduler.move")
            lost = await self._database.write(
                lambda connection, worker=worker, incarnation=incarnation: run_store.begin_moves(  # type: ignore[misc]
                    connection, worker, incarnation
                )
            )
            failpoints.passing("scheduler.moving")
            logger.warning("a trainer is gone", extra={"worker": worker, "num_runs": len(lost)})
            for run in lost:
                self._begin(run)

    def _begin(self, run: Run) -> None:
        task = asyncio.create_task(self._move(run))
        self._tasks[run.name] = task
        task.add_done_callback(lambda _: self._forget(run.name))
        MOVING_RUNS.set(len(self._tasks))

    def _forget(self, run: str) -> None:
        self._tasks.pop(run, None)
        self._waiting_for.pop(run, None)
        MOVING_RUNS.set(len(self._tasks))

    async def _move(self, run: Run) -> None:
        refused: set[str] = set()
        while True:
            try:
                async with self._slots:
                    is_over = await self._try(run, refused)
                if is_over:
                    return
            except TrainerFullError as error:
                refused.add(error.worker)
                self._waiting_for[run.name] = error.message
                continue
            except TinsmithError as error:
                self._waiting_for[run.name] = error.message
            except Exception:
                logger.exception("a move failed by a bug", extra={"run": run.name})
            refused.clear()
            await asyncio.sleep(self._retry_s)

    async def _try(self, run: Run, refused: set[str]) -> bool:
        """Try once; return whether the move is over."""
        placed = await self._adoptions.choose(run, refused)
        if isinstance(placed, Wait):
            self._waiting_for[run.name] = placed.message
            return False
        if placed is not None:
            self._waiting_for[run.name] = f"trainer {placed.worker} to take the run over"
            await self._adoptions.adopt(placed)
            await self._adoptions.activate(placed)
            MOVED_RUNS.inc()
            logger.info(
                "run moved",
                extra={"run": run.name, "worker": placed.worker, "epoch": placed.epoch},
            )
        return True
