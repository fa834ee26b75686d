"""Authorises calls of an episode: only the holder of its current lease, never an earlier one.

A proof (the token of a lease, or the key for model calls) names its attempt. That attempt may have
ended in the meantime, and the answer says how: a lease that ran out is `LEASE_LOST`, whatever the
next holder did; an attempt that was ended on request is `EPISODE_ENDED`.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tinsmith.names import EpisodeName
from tinsmith_coordinator.episodes.lease_tokens import EpisodeKey, LeaseToken, matches
from tinsmith_coordinator.store import episode_store
from tinsmith_coordinator.store.records import AttemptEnd, Episode
from tinsmith_coordinator.store.tables import attempts
from tinsmith_runtime.errors import EpisodeEndedError, KeyInvalidError, LeaseLostError

_ATTEMPT = sa.select(attempts).where(
    attempts.c.serial == sa.bindparam("row_serial"),
    attempts.c.attempt == sa.bindparam("row_attempt"),
)


def find_by_token(
    connection: sa.Connection, name: EpisodeName, token: LeaseToken
) -> tuple[Episode, AttemptEnd]:
    """Return the episode of a lease and how the attempt of the lease ended, if it did.

    Raises:
        EpisodeNotFoundError: If the project has none of this name.
        LeaseLostError: If the token never was one of this episode.
    """
    episode = episode_store.get(connection, name)
    row = _attempt(connection, episode, token.attempt)
    if row is None or not matches(token.secret, row.token_sha256):
        raise LeaseLostError(
            f"the token is of no lease of episode {name}; claim an episode", episode=name
        )
    return episode, AttemptEnd(row.end)


def find_by_key(connection: sa.Connection, key: EpisodeKey) -> tuple[Episode, AttemptEnd]:
    """Return the episode of a key and how the attempt of the key ended, if it did.

    Raises:
        KeyInvalidError: If there is no such key.
    """
    episode = episode_store.find_by_id(connection, key.episode_id)
    row = None if episode is None else _attempt(connection, episode, key.attempt)
    if episode is None or row is None or not matches(key.secret, row.key_sha256):
        raise KeyInvalidError("the key of the episode is unknown")
    return episode, AttemptEnd(row.end)


def require_active(episode: Episode, end: AttemptEnd, *, now_s: float) -> None:
    """Refuse a holder whose attempt is over.

    Raises:
        LeaseLostError: If the lease ran out, whether it was noticed before or not.
        EpisodeEndedError: If the attempt was ended.
    """
    if end is AttemptEnd.ACTIVE and episode.lease_expire_s is not None:
        if episode.lease_expire_s > now_s:
            return
        end = AttemptEnd.EXPIRED
    if end is AttemptEnd.EXPIRED:
        raise LeaseLostError(
            f"the lease of episode {episode.name} ran out and it went back to the queue; claim "
            "another one",
            episode=episode.name,
        )
    raise EpisodeEndedError(
        f"this attempt at episode {episode.name} was {end.value}; claim another one",
        episode=episode.name,
        state=end.value,
    )


def _attempt(connection: sa.Connection, episode: Episode, attempt: int) -> sa.Row[Any] | None:
    values = {"row_serial": episode.serial, "row_attempt": attempt}
    return connection.execute(_ATTEMPT, values).first()
