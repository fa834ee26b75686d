"""The ledger as PostgreSQL has it, beside the pods: what was acknowledged and what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from tests.chaos.report import Row
from tests.fakes.postgres import PostgresServer
from tinsmith_runtime.ledger.postgres import SCHEMA

_TIMEOUT_S = 90.0
_POLL_S = 0.05
_TABLES = ("runs", "leases", "operations", "snapshots", "checkpoints")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Acknowledged operations without a result.

    Attributes:
        num_queued: Those that no process began.
        num_running: Those that a process began.
        max_attempts: The most processes that began one of them.
    """

    num_queued: int
    num_running: int
    max_attempts: int

    def __bool__(self) -> bool:
        return self.num_queued + self.num_running > 0


class LedgerView:
    """Reads the ledger with sessions of its own.

    Args:
        server: Which has the database.
        database: Its name.
    """

    def __init__(self, server: PostgresServer, database: str) -> None:
        self._server = server
        self._database = database

    def unfinished(self) -> Unfinished:
        """Return what is acknowledged and has no result."""
        [counts] = self._query(
            "SELECT count(*) FILTER (WHERE num_attempts = 0),"
            " count(*) FILTER (WHERE num_attempts > 0), coalesce(max(num_attempts), 0)"
            " FROM operations WHERE state = 'pending'"
        )
        return Unfinished(*counts)

    def num_finished(self) -> int:
        """Return how many operations have a result."""
        return self._count("operations WHERE state <> 'pending'")

    def holders(self) -> list[str]:
        """Return the trainers that hold a run with unfinished operations, by worker name."""
        rows = self._query(
            "SELECT DISTINCT worker FROM leases JOIN holders ON holders.name = leases.holder"
            " JOIN operations USING (run) WHERE state = 'pending' ORDER BY 1"
        )
        return [worker for (worker,) in rows]

    def rows_of(self, run: str) -> list[str]:
        """Return every row of a run, times and revisions included.

        Without the snapshots of the run's holder: it writes one when the run comes to rest.
        """
        parts: list[str] = []
        for table in _TABLES:
            key = "name" if table == "runs" else "run"
            where = f"{key} = '{run}'"
            if table == "snapshots":
                where += (
                    f" AND folder NOT LIKE (SELECT '%-e' || epoch FROM leases l WHERE l.{where})"
                )
            rows = self._query(f"SELECT t::text FROM {table} t WHERE {where} ORDER BY 1")
            parts += [f"{table}: {row}" for (row,) in rows]
        return parts

    def wait_finished(self, num_finished: int) -> None:
        """Return once more operations than that have a result."""
        end_s = time.monotonic() + _TIMEOUT_S
        while self.num_finished() <= num_finished:
            if time.monotonic() > end_s:
                raise TimeoutError("nothing was finished for a long time")
            time.sleep(_POLL_S)

    def check(self, runs: Sequence[str]) -> list[Row]:
        """Return what must hold of the runs once their clients have every result."""
        names = ",".join(f"'{run}'" for run in runs)
        return [
            Row(
                name="acknowledged operations without a good result",
                value=self._count(f"operations WHERE state <> 'succeeded' AND run IN ({names})"),
                target=0,
            ),
            Row(
                name="sequence numbers missing in the ledger",
                value=self._count(
                    "(SELECT max(sequence_number) - count(*) AS gap FROM operations"
                    f" WHERE run IN ({names}) GROUP BY run) g WHERE gap <> 0"
                ),
                target=0,
            ),
            Row(
                name="runs marked as diverged",
                value=self._count(f"runs WHERE replay_diverged AND name IN ({names})"),
                target=0,
            ),
        ]

    def _count(self, source: str) -> int:
        return int(self._query(f"SELECT count(*) FROM {source}")[0][0])

    def _query(self, statement: str) -> list[tuple[Any, ...]]:
        return asyncio.run(_fetch(self._server.url_of(self._database), statement))


async def _fetch(url: str, statement: str) -> list[tuple[Any, ...]]:
    session = await asyncpg.connect(url, server_settings={"search_path": SCHEMA}, timeout=10)
    try:
        return [tuple(row) for row in await session.fetch(statement, timeout=30)]
    finally:
        await session.close(timeout=10)
