"""The part of the ledger that is about runs and their leases, as transactions on a SQL database."""

from __future__ import annotations

from collections.abc import Callable, Collection

import sqlalchemy as sa

from tinsmith_runtime.ledger import deletion_statements, statements
from tinsmith_runtime.ledger.records import RunRecord
from tinsmith_runtime.ledger.sql_usage import SqlUsage
from tinsmith_runtime.ledger.tables import (
    checkpoint_exports,
    checkpoint_tasks,
    checkpoints,
    expired_checkpoints,
    leases,
    operations,
    runs,
    snapshots,
)


class SqlRuns(SqlUsage):
    """Runs, and which process holds them. Without a holder one process has all."""

    async def open(self) -> None:
        """Make ready; call once, before anything else.

        Raises:
            ConfigError: If the database cannot be used.
        """

    @property
    def identity(self) -> str:
        """Names the database among those of a deployment; empty for one of this process alone."""
        return ""

    @property
    def incarnation(self) -> str:
        """Tells this process from others on the same ledger; empty where there are none."""
        return self._holder.incarnation if self._holder is not None else ""

    @property
    def is_shared(self) -> bool:
        """Whether other processes write to the same database, and runs move between them."""
        return self._holder is not None

    def hurry(self, within_s: float) -> None:
        """Let no statement wait longer for a database that is away, because the process stops.

        What was sent and not answered then raises `OutcomeUnknownError`. The rows tell the next
        process what became of it.
        """

    async def adopt_run(self, run: RunRecord) -> RunRecord:
        """Create a run or raise its epoch; return the run as it stands.

        Returns once no other process can write under an epoch before.

        Raises:
            AbortedError: If a higher epoch holds the run, or another process this one.
            RunHeldError: If the process that holds the run is alive by the database's clock.
        """
        return await self._database.write(
            lambda connection: statements.adopt(connection, run, self._holder, self._store)
        )

    async def release_run(self, run: str, epoch: int) -> None:
        """Let another process adopt a run at once.

        Raises:
            FencedError: If the epoch no longer holds.
        """

        def release(connection: sa.Connection) -> None:
            statements.check_fence(connection, run, epoch)
            statement = sa.update(leases).where(leases.c.run == run).values(holder="")
            connection.execute(statement)

        await self._database.write(release)

    async def renew(self, ttl_s: float, among: Collection[str] | None = None) -> dict[str, int]:
        """Extend the lease of this process by the database's clock.

        Args:
            ttl_s: Until when, from now.
            among: Looks at these runs alone: of those that sleep there may be very many.

        Returns:
            The epochs of the runs that it holds, by name.
        """
        holder = self._holder
        if holder is None:
            raise RuntimeError("a ledger without a holder has no lease")
        return await self._database.write(
            lambda connection: statements.renew(connection, holder, ttl_s, among)
        )

    async def watch_lease(self, changed: Callable[[], None]) -> None:
        """Call back when a run of this process was taken, until the task is cancelled.

        A hint that may be lost or wrong: its hearer renews the leases, and learns what is true.
        """

    async def leave(self) -> None:
        """Give up the lease of this process, so that others need not wait for its end."""
        holder = self._holder
        if holder is not None:
            await self._database.write(lambda connection: statements.leave(connection, holder))

    async def held_epoch(self, run: str) -> int | None:
        """Return the epoch under which a run was last adopted; None if there is no such run."""
        query = sa.select(leases.c.epoch).where(leases.c.run == run)
        return await self._database.read(
            lambda connection: connection.execute(query).scalar_one_or_none()
        )

    async def is_known(self, run: str) -> bool:
        """Return whether the ledger has a run, in whatever hands."""
        return await self.held_epoch(run) is not None

    async def list_runs(self) -> list[RunRecord]:
        """Return all runs."""
        return await self._database.read(
            lambda connection: [
                statements.run_of(row)
                for row in connection.execute(statements.select_runs()).mappings()
            ]
        )

    async def get_held_run(self, run: str) -> RunRecord | None:
        """Return a run that this process holds; None if it holds none of this name."""
        query = self._select_held().where(runs.c.name == run)
        row = await self._database.read(
            lambda connection: connection.execute(query).mappings().first()
        )
        return None if row is None else statements.run_of(row)

    async def list_held_runs(self) -> list[RunRecord]:
        """Return all runs that this process holds."""
        query = self._select_held()
        return await self._database.read(
            lambda connection: [
                statements.run_of(row) for row in connection.execute(query).mappings()
            ]
        )

    async def unsettled_runs(self, among: Collection[str] | None = None) -> list[RunRecord]:
        """Return the runs of this process that have operations without a result, or diverged.

        Args:
            among: Looks at these alone.
        """
        is_waiting = sa.exists().where(operations.c.run == runs.c.name, operations.c.revision == 0)
        query = self._select_held().where(is_waiting | runs.c.replay_diverged)
        if among is not None:
            query = query.where(runs.c.name.in_(among))
        return await self._database.read(
            lambda connection: [
                statements.run_of(row) for row in connection.execute(query).mappings()
            ]
        )

    def _select_held(self) -> sa.Select[tuple[object, ...]]:
        query = statements.select_runs()
        if self._holder is not None:
            query = query.where(leases.c.holder == self._holder.name)
        return query

    async def delete_run(self, run: str, epoch: int) -> None:
        """Remove a run with its operations, snapshots and checkpoints.

        Its files are the caller's to remove: `list_deletions` names it until `forget_deletion`.

        Raises:
            FencedError: If the epoch no longer holds.
        """

        def delete(connection: sa.Connection) -> None:
            # Alone: an operation that is accepted meanwhile would outlive its run.
            statements.lock_lease(connection, run, alone=True)
            statements.check_fence(connection, run, epoch)
            for table in (
                operations,
                snapshots,
                checkpoints,
                expired_checkpoints,
                checkpoint_exports,
                checkpoint_tasks,
                leases,
            ):
                connection.execute(sa.delete(table).where(table.c.run == run))
            deletion_statements.note_run(connection, run)
            connection.execute(sa.delete(runs).where(runs.c.name == run))

        await self._database.write(delete)
