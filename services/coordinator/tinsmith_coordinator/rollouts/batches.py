"""Asking for rollouts; reading, watching, cancelling and removing them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from functools import partial

import sqlalchemy as sa

from tinsmith.names import RolloutBatchName
from tinsmith_coordinator import metrics
from tinsmith_coordinator.episodes.episodes import request_id_reused
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.rollouts.driver import RolloutDriver, announce_batch, batch_key
from tinsmith_coordinator.rollouts.players import Players
from tinsmith_coordinator.store import rollout_store
from tinsmith_coordinator.store.database import Clock
from tinsmith_coordinator.store.rollout_records import (
    Batch,
    BatchState,
    BatchUpdate,
    EndedPlay,
    NewBatch,
)
from tinsmith_runtime.errors import QueueFullError, ResourceExhaustedError, RolloutsCancelledError
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.shielded import see_through
from tinsmith_runtime.sql import Database

MAX_QUIET_S = 20.0
"""A watch is ended after this time without an end, so that a dead peer is found out."""

_ID_BYTES = 12
_MAX_WATCHED = 256
# With one more trajectory below what a message may be; see `CoordinatorConfig`.
_MAX_WATCHED_BYTES = 2 * 2**20


class RolloutBatches:
    """The batches of all projects.

    Args:
        bells: Rung when a batch changes.
        driver: Plays them.
        players: Says whether a batch can be played.
        clock: The time, within a transaction.
        max_open: Batches of one project that are played.
        max_episodes: Episodes of one project that they may have.
        max_tokens: Tokens that these may sample.
    """

    def __init__(
        self,
        database: Database,
        bells: Bells,
        driver: RolloutDriver,
        players: Players,
        *,
        clock: Clock,
        max_open: int,
        max_episodes: int,
        max_tokens: int,
    ) -> None:
        self._database = database
        self._bells = bells
        self._driver = driver
        self._players = players
        self._clock = clock
        self._max_open = max_open
        self._max_episodes = max_episodes
        self._max_tokens = max_tokens

    async def create(self, new: NewBatch, identity: RequestIdentity, *, key_id: str) -> Batch:
        """Take a batch on; a repeated request makes none.

        Args:
            new: What is asked for.
            identity: Of the request.
            key_id: The key of the caller, by whose rights it is played.

        Raises:
            RequestIdReusedError: If the request id was used with another body.
            ResourceExhaustedError: If the batch alone is more than a project may have.
            QueueFullError: If the project has too much under way.
            TinsmithError: If no play could begin; see `Players.check`.
        """
        self._require_size("episodes", new.num_episodes, self._max_episodes)
        self._require_size("tokens", new.num_tokens, self._max_tokens)
        known = await self._database.read(partial(_find_known, identity=identity))
        if known is not None:
            return known
        await self._players.check(identity.project, new)

        def create(connection: sa.Connection) -> tuple[Batch, bool]:
            known = _find_known(connection, identity)
            if known is not None:
                return known, False
            self._require_room(connection, identity.project, new)
            batch = rollout_store.insert(
                connection,
                secrets.token_hex(_ID_BYTES),
                new,
                identity,
                key_id=key_id,
                now_s=self._clock(connection),
            )
            return batch, True

        async def create_and_begin() -> Batch:
            batch, is_new = await self._database.write(create)
            if is_new:
                metrics.ROLLOUT_BATCHES.labels("created").inc()
                self._driver.begin(batch)
            return batch

        return await see_through(create_and_begin())

    async def get(self, name: RolloutBatchName) -> Batch:
        """Return a batch.

        Raises:
            RolloutBatchNotFoundError: If the project has none of this name.
        """
        return await self._database.read(partial(rollout_store.get, name=name))

    async def list_page(
        self, project: str, *, page_size: int, before_serial: int | None
    ) -> tuple[list[Batch], int | None]:
        """Return batches of a project, newest first, and where the next page begins."""
        page = await self._database.read(
            partial(
                rollout_store.list_page,
                project=project,
                before_serial=before_serial,
                limit=page_size + 1,
            )
        )
        is_last = len(page) <= page_size
        return page[:page_size], None if is_last else page[page_size - 1].serial

    async def wait(self, name: RolloutBatchName, timeout_s: float) -> Batch:
        """Return a batch once it has ended, or after a time.

        Raises:
            RolloutBatchNotFoundError: If the project has none of this name.
            DrainingError: If the pod is about to end.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            bell = self._bells.listen(batch_key(name))
            try:
                batch = await self.get(name)
                left_s = until_s - loop.time()
                if batch.state is not BatchState.PLAYING or left_s <= 0:
                    return batch
                await bell.wait(left_s)
            finally:
                self._bells.forget(bell)

    async def list_ended(
        self, name: RolloutBatchName, *, page_size: int, after_revision: int
    ) -> tuple[list[EndedPlay], int | None]:
        """Return plays that ended, in the order of their ends, and where the next page begins.

        Raises:
            RolloutBatchNotFoundError: If the project has none of this name.
        """
        read = partial(_read_update, name=name, after_revision=after_revision, max_plays=page_size)
        update = await self._database.read(read)
        is_last = update.revision >= update.batch.revision
        return list(update.ended), None if is_last else update.revision

    async def watch(
        self, name: RolloutBatchName, after_revision: int
    ) -> AsyncIterator[BatchUpdate]:
        """Yield what ends in a batch, until it has ended or nothing ends for a while.

        Raises:
            RolloutBatchNotFoundError: If the project has none of this name.
            DrainingError: If the pod is about to end.
        """
        while True:
            bell = self._bells.listen(batch_key(name))
            try:
                read = partial(
                    _read_update, name=name, after_revision=after_revision, max_plays=_MAX_WATCHED
                )
                update = await self._database.read(read)
                is_all = update.revision >= update.batch.revision
                has_ended = is_all and update.batch.state is not BatchState.PLAYING
                is_new = update.revision > after_revision
                if is_new or has_ended:
                    yield update
                    after_revision = update.revision
                if has_ended:
                    return
                if not is_new and not await bell.wait(MAX_QUIET_S):
                    return
            finally:
                self._bells.forget(bell)

    async def cancel(self, name: RolloutBatchName) -> Batch:
        """End a batch; one that has ended stays as it is.

        Raises:
            RolloutBatchNotFoundError: If the project has none of this name.
        """

        def cancel(connection: sa.Connection) -> tuple[Batch, Batch]:
            batch = rollout_store.get(connection, name)
            if batch.state is not BatchState.PLAYING:
                return batch, batch
            after = rollout_store.end(
                connection,
                batch,
                taken=batch.taken,
                report=batch.report,
                failure=RolloutsCancelledError(f"rollouts {name} were cancelled"),
                now_s=self._clock(connection),
            )
            return batch, after

        return await see_through(self._change(cancel))

    async def delete(self, name: RolloutBatchName) -> None:
        """Remove a batch with its episodes; one that is played is ended before.

        Raises:
            RolloutBatchNotFoundError: If the project has none of this name.
        """
        batch = await self.cancel(name)
        await see_through(
            self._database.write(
                lambda connection: rollout_store.delete(connection, [batch.serial])
            )
        )

    async def _change(self, change: Callable[[sa.Connection], tuple[Batch, Batch]]) -> Batch:
        before, after = await self._database.write(change)
        announce_batch(self._bells, before, after)
        if after.state is not BatchState.PLAYING:
            self._driver.give_up(after)
        return after

    def _require_size(self, what: str, asked: int, limit: int) -> None:
        if asked > limit:
            raise ResourceExhaustedError(
                f"the batch asks for {asked} {what}, and the rollouts of a project may have "
                f"{limit}; ask for less at once",
                limit=limit,
            )

    def _require_room(self, connection: sa.Connection, project: str, new: NewBatch) -> None:
        num_open, episodes, tokens = rollout_store.open_totals(connection, project)
        for what, found, limit in (
            ("batches of rollouts", num_open + 1, self._max_open),
            ("episodes of rollouts", episodes + new.num_episodes, self._max_episodes),
            ("tokens of rollouts", tokens + new.num_tokens, self._max_tokens),
        ):
            if found > limit:
                raise QueueFullError(
                    f"the project would have {found} {what} under way, and may have {limit}; "
                    "cancel a batch, or wait for one to end",
                    limit=limit,
                )


def _find_known(connection: sa.Connection, identity: RequestIdentity) -> Batch | None:
    known = rollout_store.find_by_request(connection, identity)
    if known is None:
        return None
    batch, digest = known
    if digest != identity.digest:
        raise request_id_reused(identity.request_id)
    return batch


def _read_update(
    connection: sa.Connection, name: RolloutBatchName, after_revision: int, max_plays: int
) -> BatchUpdate:
    batch = rollout_store.get(connection, name)
    found = rollout_store.select_ended(connection, batch, after_revision, limit=max_plays + 1)
    ended: list[EndedPlay] = []
    num_bytes = 0
    for each in found:
        num_bytes += len(each.content)
        if ended and (len(ended) == max_plays or num_bytes > _MAX_WATCHED_BYTES):
            return BatchUpdate(batch, tuple(ended), ended[-1].revision)
        ended.append(each)
    return BatchUpdate(batch, tuple(ended), max(batch.revision, after_revision))
