"""Plays the batches: begins what their plans say, keeps how each play ended, and ends them.

A batch is one task, and each of its plays is one more. The end of a play is on disk before the plan
goes on from it. A coordinator that dies loses only plays that were going on, and the next one plays
these again, with the same seeds. What cannot be reached for the moment is tried again until
the deadline of the batch.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import sqlalchemy as sa

from tinsmith.backoff import backoff
from tinsmith.names import RolloutBatchName
from tinsmith.rollouts import GroupPlan, GroupReport, Play, PlayFailure, note_failure, note_plan
from tinsmith.tracing import spans
from tinsmith_coordinator import metrics
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.rollouts.players import EpisodePlayer, Played, Players
from tinsmith_coordinator.store import rollout_store
from tinsmith_coordinator.store.database import Clock
from tinsmith_coordinator.store.rollout_records import Batch, BatchState, EndedPlay
from tinsmith_coordinator.store.tables import rollout_batches
from tinsmith_runtime.errors import (
    CapacityExhaustedError,
    DeadlineExceededError,
    ErrorCode,
    NoRolloutsError,
    RolloutBatchNotFoundError,
    TinsmithError,
    internal_error,
)
from tinsmith_runtime.fairness.fair_slots import FairSlots
from tinsmith_runtime.sql import Database
from tinsmith_runtime.tenant import bind_tenant

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_TOO_LARGE = "trajectory_too_large"
_FAILED_PART = 8
"""What plays that failed may take beside the episodes of a batch, as a part of their bound."""

Running = dict[asyncio.Task[Played], Play]


class RolloutDriver:
    """Plays batches until they end.

    Args:
        bells: Rung when a batch changes.
        players: Plays episodes.
        slots: Places of episodes that are played at once, shared out by project.
        require_good: Raises unless a key, given by its id, is still good.
        clock: The time, within a transaction.
        max_trajectory_bytes: Of one episode; a larger one is a failure.
        max_bytes: Of the episodes of one batch.
    """

    def __init__(
        self,
        database: Database,
        bells: Bells,
        players: Players,
        *,
        slots: FairSlots,
        require_good: Callable[[str], Awaitable[None]],
        clock: Clock,
        max_trajectory_bytes: int,
        max_bytes: int,
    ) -> None:
        self._database = database
        self._bells = bells
        self._players = players
        self._slots = slots
        self._require_good = require_good
        self._clock = clock
        self._max_trajectory_bytes = max_trajectory_bytes
        self._max_bytes = max_bytes
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waits: dict[str, str] = {}
        self._failed_bytes: dict[str, int] = {}

    async def resume(self) -> None:
        """Go on with the batches of an earlier coordinator."""
        is_open = rollout_batches.c.state == BatchState.PLAYING.value
        for batch in await self._database.read(lambda each: rollout_store.select(each, is_open)):
            logger.info("rollouts go on", extra={"rollout_batch": str(batch.name)})
            self.begin(batch)

    def begin(self, batch: Batch) -> None:
        """Play a batch."""
        task = asyncio.create_task(self._drive(batch))
        self._tasks[batch.batch_id] = task
        task.add_done_callback(lambda _: self._forget(batch.batch_id))

    def give_up(self, batch: Batch) -> None:
        """Play a batch no longer, because it was ended."""
        task = self._tasks.get(batch.batch_id)
        if task is not None:
            task.cancel()

    def waiting_for(self, batch: Batch) -> str:
        """Return what a batch waits for, in words; empty if it has ended."""
        if batch.state is not BatchState.PLAYING:
            return ""
        return self._waits.get(batch.batch_id) or "its first episodes to begin"

    async def stop(self) -> None:
        """Give all plays up; the next coordinator goes on with them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, batch_id: str) -> None:
        self._tasks.pop(batch_id, None)
        self._waits.pop(batch_id, None)
        self._failed_bytes.pop(batch_id, None)

    async def _drive(self, batch: Batch) -> None:
        bind_tenant(batch.project)
        pauses = backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while True:
            try:
                await self._play_to_the_end(batch)
                return
            except RolloutBatchNotFoundError:
                return  # Removed meanwhile.
            except TinsmithError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    logger.exception("a batch of rollouts cannot be ended")
                    return
                self._waits[batch.batch_id] = error.message
            await asyncio.sleep(next(pauses))

    async def _play_to_the_end(self, batch: Batch) -> None:
        """Play a batch, and write how it ended.

        Raises:
            TinsmithError: What passes, such as a database that does not answer.
        """
        left_s = batch.deadline_s - await self._database.read(self._clock)
        failure: TinsmithError | None = None
        plan, report = await self._resumed(batch)
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                await self._play_groups(batch, plan, report)
            if not plan.taken:
                failure = _no_rollouts(report)
        except TimeoutError:
            failure = DeadlineExceededError(
                f"rollouts {batch.name} were not complete at their deadline"
            )
        except TinsmithError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                raise
            failure = error
        except Exception:
            logger.exception("rollouts failed by a bug", extra={"rollout_batch": str(batch.name)})
            failure = internal_error()
        await self._end(batch, plan, report, failure)

    async def _resumed(self, batch: Batch) -> tuple[GroupPlan, GroupReport]:
        """Return the plan of a batch after the plays that ended already."""

        def read(connection: sa.Connection) -> tuple[Batch, list[EndedPlay]]:
            current = rollout_store.get(connection, batch.name)
            return current, rollout_store.select_ends(connection, current)

        current, ended = await self._database.read(read)
        plan = GroupPlan(current.num_tasks, current.groups)
        plan.resume((each.play, each.has_finished, each.may_repeat) for each in ended)
        report = copy.deepcopy(current.report)
        return plan, report

    async def _play_groups(self, batch: Batch, plan: GroupPlan, report: GroupReport) -> None:
        await self._require_good(batch.key_id)
        content = await self._database.read(lambda each: rollout_store.read_content(each, batch))
        player = await self._players.open(batch.project, content)
        running: Running = {}
        try:
            while True:
                for play in plan.begin():
                    running[asyncio.create_task(self._play(batch, player, play))] = play
                self._waits[batch.batch_id] = f"{len(running)} episodes that are played"
                if plan.is_done:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ended = [
                    self._note(plan, report, play, task.result())
                    for task in sorted(done, key=running.__getitem__)
                    if (play := running.pop(task)) in plan.running or _is_forgotten(task)
                ]
                given_up = [task for task, play in running.items() if play not in plan.running]
                report.num_cancelled += len(given_up)
                for task in given_up:
                    task.cancel()
                await self._record(batch, ended, plan, report)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _play(self, batch: Batch, player: EpisodePlayer, play: Play) -> Played:
        async with self._slots.hold(batch.project):
            # A key that was revoked meanwhile plays no further episode.
            await self._require_good(batch.key_id)
            with metrics.PLAYING_EPISODES.track_inprogress(), spans.block("play episode"):
                played = await player.play(play)
        if played.failure is None and len(played.content) > self._max_trajectory_bytes:
            return Played(failure=self._too_large(played))
        if played.failure is not None and played.content:
            # What counts for nothing takes no room from what counts.
            num_bytes = self._failed_bytes.get(batch.batch_id, 0) + len(played.content)
            if num_bytes > self._max_bytes // _FAILED_PART:
                return replace(played, content=b"")
            self._failed_bytes[batch.batch_id] = num_bytes
        return played

    def _too_large(self, played: Played) -> PlayFailure:
        problem = (
            f"the trajectory takes {len(played.content)} bytes, and may take "
            f"{self._max_trajectory_bytes}"
        )
        return PlayFailure(_TOO_LARGE, problem, may_repeat=False)

    def _note(self, plan: GroupPlan, report: GroupReport, play: Play, played: Played) -> EndedPlay:
        """Tell the plan how a play ended, and return what is kept of it."""
        failure = played.failure
        metrics.PLAYED_EPISODES.labels(failure.reason if failure else "finished").inc()
        metrics.ROLLOUT_TOKENS.inc(played.num_tokens)
        if failure is None:
            plan.finish(play)
            return EndedPlay(play=play, content=played.content)
        note_failure(report, failure)
        plan.fail(play, may_repeat=failure.may_repeat)
        return EndedPlay(
            play=play,
            reason=failure.reason,
            problem=failure.problem,
            content=played.content,
            may_repeat=failure.may_repeat,
        )

    async def _record(
        self, batch: Batch, ended: list[EndedPlay], plan: GroupPlan, report: GroupReport
    ) -> None:
        """Write plays that ended.

        Raises:
            CapacityExhaustedError: If the episodes of the batch take too much.
        """
        note_plan(report, plan)

        def record(connection: sa.Connection) -> tuple[Batch, Batch]:
            current = rollout_store.get(connection, batch.name)
            if current.state is not BatchState.PLAYING:
                return current, current
            return current, rollout_store.record(connection, current, ended, report)

        before, after = await self._database.write(record)
        announce_batch(self._bells, before, after)
        if after.num_bytes > self._max_bytes:
            raise CapacityExhaustedError(
                f"the episodes of rollouts {batch.name} take more than {self._max_bytes} bytes; "
                "ask for fewer at once",
                limit=self._max_bytes,
            )

    async def _end(
        self, batch: Batch, plan: GroupPlan, report: GroupReport, failure: TinsmithError | None
    ) -> None:
        note_plan(report, plan)

        def end(connection: sa.Connection) -> tuple[Batch, Batch]:
            current = rollout_store.get(connection, batch.name)
            if current.state is not BatchState.PLAYING:
                return current, current
            after = rollout_store.end(
                connection,
                current,
                taken=plan.taken,
                report=report,
                failure=failure,
                now_s=self._clock(connection),
            )
            return current, after

        before, after = await self._database.write(end)
        announce_batch(self._bells, before, after)


def batch_key(name: RolloutBatchName) -> tuple[str, str]:
    """Return what is rung when a batch changes."""
    return ("rollouts", str(name))


def announce_batch(bells: Bells, before: Batch, after: Batch) -> None:
    """Wake the calls that wait for a batch to change, after the commit."""
    if after.revision == before.revision:
        return
    bells.ring_all(batch_key(after.name))
    if after.state is not before.state:
        metrics.ROLLOUT_BATCHES.labels(after.state.value).inc()
        logger.info(
            "rollouts ended",
            extra={
                "rollout_batch": str(after.name),
                "state": after.state.value,
                "reason": after.failure.reason if after.failure else "",
            },
        )


def _is_forgotten(task: asyncio.Task[Played]) -> bool:
    """Look at the outcome of a play that was given up, which no other code does."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("a play that was given up failed", extra={"problem": str(error)})
    return False


def _no_rollouts(report: GroupReport) -> NoRolloutsError:
    return NoRolloutsError(
        f"not one group of {report.num_requested} episodes survived; failures: "
        f"{dict(report.failures)}; the last was: {report.last_failure}",
        last_failure=report.last_failure,
    )
