"""Rows of futures that no other pod keeps.

A future is promised once its row is on disk, and told only once its end is. When a client first got
a result is noted now and then, since losing the note keeps a result longer and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
from google.rpc import status_pb2

from tinsmith.rpc.error_codec import decode_status, encode_status
from tinsmith_gateway.store.tables import futures
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.sql import Database, insert

SAMPLE = "sample"
REFUSAL = "refusal"
RECORDING = "recording"
"""What was sampled, kept for training that refers to it."""
RECORDING_RETENTION_S = 24 * 3600.0

_DOMAIN = "gateway.tinsmith"
_MAX_NOTED = 100_000


@dataclass(frozen=True, slots=True)
class FutureRecord:
    """A future.

    Attributes:
        future: Its id.
        project: Id of the project that may ask for it.
        kind: What it is for.
        owner: The sampling session or model that it belongs to.
        request: What was asked for.
        result: What came of it; None before it ended, and if it failed.
        error: Why it failed; None otherwise.
        revision: Orders the ends of all futures; 0 before.
    """

    future: str
    project: str
    kind: str
    owner: str
    request: bytes
    result: bytes | None
    error: TinsmithError | None
    revision: int

    @property
    def is_ended(self) -> bool:
        """Whether there is a result or an error."""
        return self.result is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class EndedFuture:
    """A future that ended.

    Attributes:
        future: Its id.
        revision: Its place among all ends.
        num_bytes: Size of the result; None if it failed.
    """

    future: str
    revision: int
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """When something was asked for and when it ended, in seconds since the epoch."""

    id: str
    kind: str
    begin_s: float
    end_s: float | None


class FutureStore:
    """The futures of all projects.

    Args:
        database: Where they are kept.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, database: Database, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._wall_clock = wall_clock
        self._revision = 0
        self._retrieved: set[tuple[str, str]] = set()

    async def load(self) -> None:
        """Go on behind the last revision; call once, before anything ends."""
        query = sa.select(sa.func.max(futures.c.revision))
        self._revision = await self._database.read(
            lambda connection: connection.execute(query).scalar_one() or 0
        )

    async def add(
        self, project: str, future: str, kind: str, *, owner: str = "", request: bytes = b""
    ) -> bool:
        """Promise a future; return whether it is new."""
        row = _row(project, future, kind, owner, request, self._wall_clock())

        def write(connection: sa.Connection) -> bool:
            added = connection.execute(
                insert(connection, futures)
                .values(**row)
                .on_conflict_do_nothing()
                .returning(futures.c.future)
            )
            return added.first() is not None

        return await self._database.write(write)

    async def add_ended(
        self,
        project: str,
        future: str,
        kind: str,
        *,
        owner: str = "",
        request: bytes = b"",
        result: bytes | None = None,
        error: TinsmithError | None = None,
    ) -> None:
        """Keep a future that ended as it was made; a repeat changes nothing.

        Args:
            project: Id of the project.
            future: Its id.
            kind: What it is.
            owner: What it belongs to.
            request: What was asked for.
            result: How it ended.
            error: Why it failed.
        """
        now_s = self._wall_clock()
        self._revision += 1
        row = {
            **_row(project, future, kind, owner, request, now_s),
            "result": result,
            "error": _encode(error),
            "revision": self._revision,
            "finish_time_s": now_s,
        }

        def write(connection: sa.Connection) -> None:
            connection.execute(insert(connection, futures).values(**row).on_conflict_do_nothing())

        await self._database.write(write)

    async def finish(
        self,
        project: str,
        future: str,
        *,
        result: bytes | None = None,
        error: TinsmithError | None = None,
    ) -> int:
        """Keep how a future ended, and return its revision; the first end counts."""
        self._revision += 1
        revision, now_s = self._revision, self._wall_clock()
        await self._database.write(
            lambda connection: connection.execute(
                sa.update(futures)
                .where(futures.c.project == project, futures.c.future == future)
                .where(futures.c.revision == 0)
                .values(
                    result=result,
                    error=_encode(error),
                    revision=revision,
                    finish_time_s=now_s,
                    # Kept to be drawn again, which is over.
                    request=b"",
                )
            )
        )
        return revision

    async def discard(self, project: str, future: str) -> None:
        """Forget a future that was refused after all, and so was never given out."""
        await self._database.write(
            lambda connection: connection.execute(
                sa.delete(futures).where(futures.c.project == project, futures.c.future == future)
            )
        )

    async def get(self, project: str, future: str) -> FutureRecord | None:
        """Return a future of a project, or None."""
        if "\0" in future:
            # No id has one, and PostgreSQL takes no text with one.
            return None
        query = sa.select(futures).where(futures.c.future == future, futures.c.project == project)

        def read(connection: sa.Connection) -> FutureRecord | None:
            row = connection.execute(query).first()
            return None if row is None else _record(row)

        return await self._database.read(read)

    async def pending(self, kind: str) -> list[FutureRecord]:
        """Return the futures of a kind that have not ended, oldest first."""
        query = (
            sa.select(futures)
            .where(futures.c.kind == kind, futures.c.revision == 0)
            .order_by(futures.c.create_time_s)
        )
        return await self._database.read(
            lambda connection: [_record(row) for row in connection.execute(query)]
        )

    async def ended(self, owner: str, *, after: int, limit: int) -> list[EndedFuture]:
        """Return what ended of an owner's futures after a revision, in order."""
        query = (
            sa.select(futures.c.future, futures.c.revision, sa.func.length(futures.c.result))
            .where(futures.c.owner == owner, futures.c.revision > after)
            .order_by(futures.c.revision)
            .limit(limit)
        )
        return await self._database.read(
            lambda connection: [EndedFuture(*row) for row in connection.execute(query)]
        )

    async def spans(self, owner: str) -> list[Span]:
        """Return when the futures of an owner began and ended, oldest first."""
        query = (
            sa.select(
                futures.c.future, futures.c.kind, futures.c.create_time_s, futures.c.finish_time_s
            )
            .where(futures.c.owner == owner)
            .order_by(futures.c.create_time_s)
        )
        return await self._database.read(
            lambda connection: [Span(*row) for row in connection.execute(query)]
        )

    def note_retrieved(self, project: str, future: str) -> None:
        """Note that a client got a result; of what is no future of the project nothing comes."""
        if "\0" not in future and len(self._retrieved) < _MAX_NOTED:
            self._retrieved.add((project, future))

    async def sweep(self, *, retrieved_s: float, unretrieved_s: float) -> int:
        """Forget what was kept long enough, and return how many futures that were.

        Args:
            retrieved_s: How long a result is kept after a client first got it.
            unretrieved_s: How long a result is kept that was never asked for.
        """
        retrieved, self._retrieved = self._retrieved, set()
        now_s = self._wall_clock()

        def write(connection: sa.Connection) -> int:
            if retrieved:
                connection.execute(
                    sa.update(futures)
                    .where(futures.c.project == sa.bindparam("its_project"))
                    .where(futures.c.future == sa.bindparam("its_future"))
                    .where(futures.c.retrieve_time_s.is_(None))
                    .values(retrieve_time_s=now_s),
                    [
                        {"its_project": project, "its_future": future}
                        for project, future in sorted(retrieved)
                    ],
                )
            deleted = connection.execute(
                sa.delete(futures).where(
                    sa.or_(
                        futures.c.retrieve_time_s < now_s - retrieved_s,
                        futures.c.finish_time_s < now_s - unretrieved_s,
                        sa.and_(
                            futures.c.kind == RECORDING,
                            futures.c.finish_time_s < now_s - RECORDING_RETENTION_S,
                        ),
                    ),
                )
            )
            return deleted.rowcount

        return await self._database.write(write)


def _row(
    project: str, future: str, kind: str, owner: str, request: bytes, now_s: float
) -> dict[str, object]:
    return {
        "future": future,
        "project": project,
        "kind": kind,
        "owner": owner,
        "request": request,
        "revision": 0,
        "create_time_s": now_s,
    }


def _encode(error: TinsmithError | None) -> bytes | None:
    return None if error is None else encode_status(error, domain=_DOMAIN).SerializeToString()


def _record(row: sa.Row[tuple[object, ...]]) -> FutureRecord:
    values = row._mapping
    error = values["error"]
    return FutureRecord(
        future=values["future"],
        project=values["project"],
        kind=values["kind"],
        owner=values["owner"],
        request=values["request"],
        result=values["result"],
        error=None if error is None else decode_status(status_pb2.Status.FromString(error)),
        revision=values["revision"],
    )
