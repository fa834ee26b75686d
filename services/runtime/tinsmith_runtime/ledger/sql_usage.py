"""The part of the ledger that is about usage, as transactions on a SQL database."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith_runtime.ledger import usage_statements
from tinsmith_runtime.ledger.records import Holder
from tinsmith_runtime.ledger.sql_deletions import SqlDeletions
from tinsmith_runtime.sql import Database
from tinsmith_runtime.usage import UsageAmounts, UsageKey


class SqlUsage(SqlDeletions):
    """Totals of what runs used.

    Args:
        database: Holds the tables of `tables`; a subclass may open it later.
        holder: This process, where several share the database.
        store: Names the store of this process; empty if the ledger knows only one.
    """

    def __init__(
        self, database: Database | None = None, *, holder: Holder | None = None, store: str = ""
    ) -> None:
        super().__init__(database, store=store)
        self._holder = holder

    async def unreported_usage(self, limit: int) -> dict[UsageKey, UsageAmounts]:
        """Return totals that were not reported since they last grew.

        Those of runs that another process holds are left out.
        """
        holder = None if self._holder is None else self._holder.name
        return await self._database.read(
            lambda connection: usage_statements.unreported(connection, holder, limit)
        )

    async def note_usage_reported(
        self, totals: Mapping[UsageKey, UsageAmounts], *, forget_before: int
    ) -> None:
        """Note that the scheduler has totals, and forget those that it has of days before one."""
        await self._database.write(
            lambda connection: usage_statements.note_reported(
                connection, totals, forget_before=forget_before
            )
        )

    async def stored_bytes(self) -> dict[tuple[str, str], int]:
        """Return what checkpoints and exports take, by project and run."""
        return await self._database.read(usage_statements.stored_bytes)
