"""One process at a time: an advisory lock on the writer's session, and a row that names its holder.

The lock ends with the session, so no transaction commits without it. When a session is lost, the
row tells whether another process held the lock before this one got it back.
"""

from __future__ import annotations

import hashlib
import logging

import asyncpg

from tinsmith_runtime.sql.postgres_sessions import (
    Connection,
    PassingError,
    PostgresTarget,
    answer_within,
)

logger = logging.getLogger(__name__)

_WAIT_MS = 1000


class HoldLostError(Exception):
    """Another process took the lock; this one must stop."""


class Hold:
    """The right of one process to write to a schema.

    Args:
        target: The schema.
        name: The role that is held, such as `scheduler`.
        holder: Names this process in the row, differently at each start.
    """

    def __init__(self, target: PostgresTarget, name: str, *, holder: str) -> None:
        self._target = target
        self._name = name
        self._holder = holder
        self._is_known = False
        digest = hashlib.sha256(f"{target.schema}\0{name}".encode()).digest()
        self._key = int.from_bytes(digest[:8], signed=True)

    async def wait(self, session: Connection) -> None:
        """Return once no other process holds the lock.

        Raises:
            asyncpg.PostgresError: If the session is lost.
        """
        is_told = False
        while not await self._try(session):
            if not is_told:
                logger.warning(
                    "waiting: another process holds the database",
                    extra={"database": self._target.name, "role": self._name}
                    | await self._describe(session),
                )
                is_told = True
        if is_told:
            logger.info("took over", extra={"database": self._target.name, "role": self._name})

    async def sign(self, session: Connection) -> None:
        """Write down that this process holds the lock, which it does."""
        await session.execute(
            "INSERT INTO tinsmith_writers (writer, last_commit) VALUES ($1, $2) "
            "ON CONFLICT (writer) DO UPDATE SET last_commit = excluded.last_commit, seen = now()",
            self._row(),
            self._holder,
        )
        self._is_known = True

    async def take_again(self, session: Connection) -> None:
        """Take the lock for a new session.

        Raises:
            HoldLostError: If another process held it meanwhile.
            PassingError: If it is still held, perhaps by the session that was lost.
        """
        if not await self._try(session):
            await self._check_row(session)
            raise PassingError("the lock is held, perhaps by the session that was lost")
        await self._check_row(session)

    async def _try(self, session: Connection) -> bool:
        """Wait for the lock for a while."""
        await session.execute(f"SET lock_timeout = {_WAIT_MS}")
        try:
            call = session.execute(f"SELECT pg_advisory_lock({self._key})")
            await answer_within(session, self._target.answer_timeout_s, call)
        except asyncpg.LockNotAvailableError:
            return False
        await session.execute("RESET lock_timeout")
        return True

    async def _check_row(self, session: Connection) -> None:
        query = "SELECT last_commit FROM tinsmith_writers WHERE writer = $1"
        found = await session.fetchval(query, self._row())
        if self._is_known and found != self._holder:
            raise HoldLostError(f"another {self._name} has taken over {self._target.name}")

    async def _describe(self, session: Connection) -> dict[str, str]:
        """Return the holder of the lock, as far as the server tells this role."""
        # As `pg_locks` splits the key of 64 bits.
        unsigned = self._key % 2**64
        row = await session.fetchrow(
            "SELECT pid::text AS holder_pid, coalesce(host(client_addr), '') AS holder_address, "
            "backend_start::text AS held_since FROM pg_locks JOIN pg_stat_activity USING (pid) "
            "WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
            f"AND classid = {unsigned >> 32} AND objid = {unsigned % 2**32}"
        )
        return dict(row) if row is not None else {}

    def _row(self) -> str:
        return f"hold:{self._name}"
