"""Claiming, keeping and ending an attempt at an episode.

Each change is one transaction, answered after its commit. A lease is judged by the clock of the
database alone, in the transaction that relies on it. So a submit and the end of its lease cannot
both happen. Calls that wait for an episode are woken; see `waiters`.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import sqlalchemy as sa

from tinsmith.names import EpisodeName
from tinsmith_coordinator import metrics
from tinsmith_coordinator.episodes.episodes import announce, held_key, request_id_reused
from tinsmith_coordinator.episodes.lease_check import find_by_key, find_by_token, require_active
from tinsmith_coordinator.episodes.lease_tokens import (
    EpisodeKey,
    LeaseToken,
    derive_secret,
    hash_secret,
)
from tinsmith_coordinator.episodes.waiters import Bell, Bells
from tinsmith_coordinator.store import episode_store
from tinsmith_coordinator.store.database import Clock
from tinsmith_coordinator.store.records import (
    AttemptEnd,
    Claim,
    Episode,
    EpisodeOutcome,
    EpisodeState,
    Lease,
    NewCall,
    NoEpisode,
)
from tinsmith_coordinator.store.tables import attempts, episodes, model_calls
from tinsmith_runtime.errors import (
    CapacityExhaustedError,
    EpisodeEndedError,
    InvalidFieldError,
    KeyInvalidError,
    LeaseLostError,
)
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.shielded import see_through
from tinsmith_runtime.sql import Database

ResultT = TypeVar("ResultT")
Change = tuple[Episode, Episode]
"""An episode before and after."""

_SALT_BYTES = 32
# Built once; see `episode_store`.
_INSERT_ATTEMPT = sa.insert(attempts)
_BY_REQUEST = sa.select(attempts).where(
    attempts.c.project == sa.bindparam("project"),
    attempts.c.request_sha256 == sa.bindparam("request_sha256"),
)


class Leases:
    """The attempts at all episodes.

    Args:
        bells: Rung when episodes come back and end.
        clock: The time, within a transaction.
        max_trajectory_bytes: What the model calls of an attempt may take.
    """

    def __init__(
        self, database: Database, bells: Bells, *, clock: Clock, max_trajectory_bytes: int
    ) -> None:
        self._database = database
        self._bells = bells
        self._clock = clock
        self._max_trajectory_bytes = max_trajectory_bytes

    async def claim(self, claim: Claim, request: RequestIdentity) -> Lease | NoEpisode:
        """Give the oldest episode that waits, once there is one or the time of the claim is over.

        Raises:
            RequestIdReusedError: If the request id was used with another body.
            DrainingError: If the pod is about to end.
        """
        deadline_s = time.monotonic() + claim.timeout_s
        queue_bell: Bell | None = None
        # A wake-up that no look has answered yet: another call must get it if this one ends.
        owes_look = False
        try:
            while True:
                queue_bell = self._bells.listen(claim.key)
                held_bell = self._bells.listen(held_key(claim.key.project, claim.client_id))
                try:
                    answer = await self._look(claim, request)
                    if isinstance(answer, Lease):
                        return answer
                    owes_look = owes_look and answer.is_throttled
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0 or answer.is_final:
                        return answer
                    if answer.is_throttled:
                        self._pass_on(queue_bell, owes_look)
                        owes_look = False
                        await held_bell.wait(left_s)
                    else:
                        await queue_bell.wait(left_s)
                        owes_look = queue_bell.has_rung
                        self._bells.forget(queue_bell)
                    queue_bell = None
                finally:
                    self._bells.forget(held_bell)
        finally:
            if queue_bell is not None:
                self._pass_on(queue_bell, owes_look)
            elif owes_look:
                self._bells.ring(claim.key)

    async def heartbeat(self, name: EpisodeName, token: LeaseToken) -> Episode:
        """Renew a lease.

        Raises:
            EpisodeNotFoundError: If the project has no such episode.
            LeaseLostError: If the lease ran out.
            EpisodeEndedError: If the attempt was ended.
        """

        def renew(connection: sa.Connection) -> Episode:
            episode, end = find_by_token(connection, name, token)
            return self._renew(connection, episode, end)

        return await self._fenced(renew)

    async def submit(
        self, name: EpisodeName, token: LeaseToken, outcome: EpisodeOutcome
    ) -> Episode:
        """End an episode with what it was worth; the same again is answered the same.

        Raises:
            EpisodeNotFoundError: If the project has no such episode.
            LeaseLostError: If the lease ran out.
            EpisodeEndedError: If the attempt was ended, or submitted with another outcome.
            InvalidFieldError: If the rewards of steps do not fit the model calls.
        """

        def submit(connection: sa.Connection) -> Change:
            episode, end = find_by_token(connection, name, token)
            if end is AttemptEnd.SUBMITTED and episode.outcome == outcome:
                return episode, episode
            now_s = self._clock(connection)
            require_active(episode, end, now_s=now_s)
            num_rewards = len(outcome.step_rewards)
            if num_rewards and num_rewards != episode.num_model_calls:
                raise InvalidFieldError(
                    "outcome.step_rewards",
                    f"has {num_rewards} entries, the attempt has {episode.num_model_calls} model "
                    "calls",
                )
            episode_store.end_attempt(connection, episode, AttemptEnd.SUBMITTED)
            return episode, episode_store.finish(
                connection, episode, EpisodeState.SUBMITTED, now_s=now_s, outcome=outcome
            )

        return await see_through(self._change(submit))

    async def abort(self, name: EpisodeName, token: LeaseToken, reason: str) -> Episode:
        """Give an attempt up; repeating it changes nothing.

        Raises:
            EpisodeNotFoundError: If the project has no such episode.
            LeaseLostError: If the lease ran out before.
            EpisodeEndedError: If it was submitted or cancelled.
        """

        def abort(connection: sa.Connection) -> Change:
            episode, end = find_by_token(connection, name, token)
            if end is AttemptEnd.ABORTED:
                return episode, episode
            now_s = self._clock(connection)
            require_active(episode, end, now_s=now_s)
            return episode, episode_store.give_up_attempt(
                connection,
                episode,
                AttemptEnd.ABORTED,
                f"aborted: {reason}" if reason else "aborted",
                now_s=now_s,
            )

        return await see_through(self._change(abort))

    async def verify_key(self, key: EpisodeKey) -> Episode:
        """Return the episode of a key, and renew its lease.

        Raises:
            KeyInvalidError: If there is no such key.
            LeaseLostError: If its lease ran out.
            EpisodeEndedError: If the attempt was ended.
        """

        def renew(connection: sa.Connection) -> Episode:
            episode, end = find_by_key(connection, key)
            return self._renew(connection, episode, end)

        return await self._fenced(renew)

    async def record_call(self, name: EpisodeName, key: EpisodeKey, call: NewCall) -> int:
        """Keep a model call and renew the lease; return the index of its first sample.

        Raises:
            KeyInvalidError: If the key is not one of this episode.
            LeaseLostError: If its lease ran out.
            EpisodeEndedError: If the attempt was ended.
            RequestIdReusedError: If the request id was used with another body.
            CapacityExhaustedError: If the calls of the attempt take too much.
        """

        def record(connection: sa.Connection) -> tuple[int, bool]:
            episode, end = find_by_key(connection, key)
            if episode.name != name:
                raise KeyInvalidError(f"the key is not one of episode {name}", episode=name)
            episode = self._renew(connection, episode, end)
            known = connection.execute(
                sa.select(model_calls.c.first_index, model_calls.c.digest).where(
                    model_calls.c.serial == episode.serial,
                    model_calls.c.request_id == call.request_id,
                )
            ).first()
            if known is not None:
                if known.digest != call.digest:
                    raise request_id_reused(call.request_id)
                return known.first_index, False
            self._insert_call(connection, episode, call)
            return episode.num_model_calls, True

        first_index, is_new = await self._fenced(record)
        if is_new:
            metrics.RECORDED_CALLS.inc(call.num_sequences)
            metrics.RECORDED_BYTES.inc(len(call.content))
        return first_index

    async def _look(self, claim: Claim, request: RequestIdentity) -> Lease | NoEpisode:
        begin_s = time.perf_counter()
        answer, kind = await self._database.write(
            partial(self._try_claim, claim=claim, request=request)
        )
        metrics.CLAIM_SECONDS.observe(time.perf_counter() - begin_s)
        metrics.CLAIMS.labels(kind).inc()
        return answer

    def _try_claim(
        self, connection: sa.Connection, claim: Claim, request: RequestIdentity
    ) -> tuple[Lease | NoEpisode, str]:
        """Return the answer to a claim as things stand, and what kind it is of."""
        now_s = self._clock(connection)
        repeated = self._recall(connection, request, now_s=now_s)
        if repeated is not None:
            return repeated, "repeated"
        held = self._throttled(connection, claim)
        if held is not None:
            return held, "throttled"
        episode = episode_store.find_oldest(connection, claim.key)
        if episode is None:
            return NoEpisode(_why_none(connection, claim, now_s=now_s)), "none"
        episode = episode_store.change(
            connection,
            episode,
            state=EpisodeState.CLAIMED,
            num_attempts=episode.num_attempts + 1,
            client_id=claim.client_id,
            lease_duration_s=claim.lease_duration_s,
            lease_expire_s=now_s + claim.lease_duration_s,
        )
        salt = secrets.token_bytes(_SALT_BYTES)
        lease = _make_lease(episode, salt, request.request_id)
        values = {
            "serial": episode.serial,
            "attempt": episode.num_attempts,
            "project": request.project,
            "request_sha256": _request_sha256(request),
            "request_digest": request.digest,
            "salt": salt,
            "token_sha256": hash_secret(LeaseToken.parse(lease.token).secret),
            "key_sha256": hash_secret(EpisodeKey.parse(lease.api_key).secret),
            "end": AttemptEnd.ACTIVE.value,
        }
        connection.execute(_INSERT_ATTEMPT, values)
        return lease, "given"

    def _recall(
        self, connection: sa.Connection, request: RequestIdentity, *, now_s: float
    ) -> Lease | NoEpisode | None:
        """Return what a claim got before, if it got an episode."""
        values = {"project": request.project, "request_sha256": _request_sha256(request)}
        row = connection.execute(_BY_REQUEST, values).first()
        if row is None:
            return None
        if row.request_digest != request.digest:
            raise request_id_reused(request.request_id)
        query = sa.select(episodes).where(episodes.c.serial == row.serial)
        [episode] = episode_store.select(connection, query)
        try:
            require_active(episode, AttemptEnd(row.end), now_s=now_s)
        except (LeaseLostError, EpisodeEndedError):
            # A repeat that comes late must not take another episode, which no agent would play.
            return NoEpisode(
                f"nothing: the lease that this request got, of episode {episode.name}, is over; "
                "claim with a new request id",
                is_final=True,
            )
        return _make_lease(episode, row.salt, request.request_id)

    def _throttled(self, connection: sa.Connection, claim: Claim) -> NoEpisode | None:
        if not claim.max_held:
            return None
        num_held = episode_store.count(
            connection,
            episodes.c.project == claim.key.project,
            episodes.c.state == EpisodeState.CLAIMED.value,
            episodes.c.client_id == claim.client_id,
        )
        if num_held < claim.max_held:
            return None
        return NoEpisode(
            f"client {claim.client_id} holds {num_held} episodes and asked for {claim.max_held} at "
            "most: the end of one of them",
            is_throttled=True,
        )

    def _renew(self, connection: sa.Connection, episode: Episode, end: AttemptEnd) -> Episode:
        now_s = self._clock(connection)
        require_active(episode, end, now_s=now_s)
        return episode_store.change(
            connection, episode, lease_expire_s=now_s + episode.lease_duration_s
        )

    def _insert_call(self, connection: sa.Connection, episode: Episode, call: NewCall) -> None:
        num_bytes = episode.trajectory_bytes + len(call.content)
        if num_bytes > self._max_trajectory_bytes:
            raise CapacityExhaustedError(
                f"the model calls of episode {episode.name} would take {num_bytes} bytes, above "
                f"{self._max_trajectory_bytes}; end the episode",
                episode=episode.name,
                limit=self._max_trajectory_bytes,
            )
        connection.execute(
            sa.insert(model_calls).values(
                serial=episode.serial,
                first_index=episode.num_model_calls,
                request_id=call.request_id,
                digest=call.digest,
                content=call.content,
            )
        )
        episode_store.change(
            connection,
            episode,
            num_model_calls=episode.num_model_calls + call.num_sequences,
            trajectory_bytes=num_bytes,
        )

    async def _fenced(self, statements: Callable[[sa.Connection], ResultT]) -> ResultT:
        try:
            return await self._database.write(statements)
        except (LeaseLostError, EpisodeEndedError) as error:
            metrics.FENCED_CALLS.labels(error.reason).inc()
            raise

    async def _change(self, statements: Callable[[sa.Connection], Change]) -> Episode:
        before, after = await self._fenced(statements)
        if before is not after:
            announce(self._bells, before, after)
            if len(after.failures) > len(before.failures):
                metrics.LOST_ATTEMPTS.labels("aborted").inc()
        return after

    def _pass_on(self, bell: Bell, owes_look: bool) -> None:
        self._bells.forget(bell)
        if owes_look or bell.has_rung:
            self._bells.ring(bell.key)


def _make_lease(episode: Episode, salt: bytes, request_id: str) -> Lease:
    attempt = episode.num_attempts
    token = LeaseToken(attempt, derive_secret(salt, request_id, "lease"))
    key = EpisodeKey(episode.episode_id, attempt, derive_secret(salt, request_id, "key"))
    return Lease(episode, str(token), str(key))


def _request_sha256(request: RequestIdentity) -> bytes:
    return hashlib.sha256(request.request_id.encode()).digest()


def _why_none(connection: sa.Connection, claim: Claim, *, now_s: float) -> str:
    """Say in words why a queue has nothing to give."""
    held = episode_store.in_queue(claim.key, EpisodeState.CLAIMED)
    num_held, next_expire_s = connection.execute(
        sa.select(sa.func.count(), sa.func.min(episodes.c.lease_expire_s)).where(held)
    ).one()
    what = f"an episode of type {claim.key.type.value} in queue {claim.key.queue}"
    if not num_held:
        return f"{what}; none is open"
    left_s = max(0.0, next_expire_s - now_s)
    return f"{what}; {num_held} are being played, and the next lease ends in {left_s:.0f} s"
