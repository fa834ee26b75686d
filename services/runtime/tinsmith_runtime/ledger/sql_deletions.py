"""The part of the ledger that is about files to be removed, as transactions on a SQL database."""

from __future__ import annotations

from collections.abc import Collection

from tinsmith_runtime.ledger import deletion_statements
from tinsmith_runtime.sql import Database


class SqlDeletions:
    """Folders and deleted runs whose files are still there.

    Args:
        database: Holds the tables of `tables`; a subclass may open it later.
        store: Names the store of this process; empty if the ledger knows only one.
    """

    def __init__(self, database: Database | None = None, *, store: str = "") -> None:
        self._opened = database
        self._store = store

    @property
    def _database(self) -> Database:
        if self._opened is None:
            raise RuntimeError("the ledger is not open")
        return self._opened

    async def list_deletions(self) -> list[str]:
        """Return the deleted runs whose files may still be in the store of this process."""
        return await self._database.read(
            lambda connection: deletion_statements.list_runs(connection, self._store)
        )

    async def owes_deletion(self, run: str) -> bool:
        """Return whether `list_deletions` names a run."""
        found = await self._database.read(
            lambda connection: deletion_statements.list_runs(connection, self._store, run)
        )
        return bool(found)

    async def forget_deletion(self, run: str) -> None:
        """Note that the files of a deleted run are gone from the store of this process."""
        await self._database.write(
            lambda connection: deletion_statements.forget_run(connection, self._store, run)
        )

    async def note_folder_deletions(
        self, run: str, folders: Collection[str], *, not_before_s: float
    ) -> None:
        """Note that folders of a run are to be removed from its store, from a time on."""
        await self._database.write(
            lambda connection: deletion_statements.note_folders(
                connection, run, folders, not_before_s, written_to=self._store
            )
        )

    async def list_folder_deletions(self, *, now_s: float) -> list[str]:
        """Return the folders whose files are to be removed now from the store of this process."""
        return await self._database.read(
            lambda connection: deletion_statements.list_folders(connection, self._store, now_s)
        )

    async def forget_folder_deletion(self, folder: str) -> None:
        """Note that the files of a folder are gone from the store of this process."""
        await self._database.write(
            lambda connection: deletion_statements.forget_folder(connection, self._store, folder)
        )
