"""What is to be removed from the object stores: noted by the transaction that deletes the rows.

Trainers of one ledger may keep their files in several stores, as those of a job with a bucket of
its own. So a run remembers the store of the trainer that adopted it last, and every note names it.
Only a process of that store may take the note: to another one the files seem gone already. A note
from before stores were named belongs to every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import sqlalchemy as sa

from tinsmith_runtime.ledger.tables import deletions, folder_deletions, runs
from tinsmith_runtime.sql import insert


def store_id(uri: str) -> str:
    """Return what names a store in the ledger: the start of the SHA-256 of its URI."""
    return hashlib.sha256(uri.encode()).hexdigest()[:32]


def store_of(connection: sa.Connection, run: str) -> str:
    """Return the store of a run; empty if it is not known."""
    found: str | None = connection.execute(
        sa.select(runs.c.store).where(runs.c.name == run)
    ).scalar_one_or_none()
    return found or ""


def note_run(connection: sa.Connection, run: str) -> None:
    """Note that the files of a run are to be removed; its row must still be there."""
    connection.execute(
        insert(connection, deletions)
        .values(run=run, store=store_of(connection, run))
        .on_conflict_do_nothing()
    )


def note_folders(
    connection: sa.Connection,
    run: str,
    folders: Iterable[str],
    not_before_s: float,
    *,
    written_to: str = "",
) -> None:
    """Note folders of a run whose files are to be removed.

    Args:
        connection: The transaction.
        run: Says in which store they are.
        folders: What is to be removed.
        not_before_s: When that may be done.
        written_to: The store, if there is no such run any more.
    """
    store = store_of(connection, run) or written_to
    for folder in folders:
        connection.execute(
            insert(connection, folder_deletions)
            .values(folder=folder, store=store, not_before_s=not_before_s)
            .on_conflict_do_nothing()
        )


def list_runs(connection: sa.Connection, store: str, run: str | None = None) -> list[str]:
    """Return the deleted runs whose files a process of a store is to remove.

    Args:
        connection: The transaction.
        store: The store; empty takes the notes of all.
        run: Looks for this one alone.
    """
    query = sa.select(deletions.c.run).distinct().order_by(deletions.c.run)
    query = query.where(_is_of(deletions, store))
    if run is not None:
        query = query.where(deletions.c.run == run)
    return list(connection.execute(query).scalars())


def list_folders(connection: sa.Connection, store: str, now_s: float) -> list[str]:
    """Return the folders whose time to be removed by a process of a store has come."""
    query = sa.select(folder_deletions.c.folder).distinct()
    query = query.where(_is_of(folder_deletions, store), folder_deletions.c.not_before_s <= now_s)
    return list(connection.execute(query).scalars())


def forget_run(connection: sa.Connection, store: str, run: str) -> None:
    """Note that the files of a run are gone from a store."""
    statement = sa.delete(deletions).where(deletions.c.run == run, _is_of(deletions, store))
    connection.execute(statement)


def forget_folder(connection: sa.Connection, store: str, folder: str) -> None:
    """Note that a folder is gone from a store."""
    connection.execute(
        sa.delete(folder_deletions).where(
            folder_deletions.c.folder == folder, _is_of(folder_deletions, store)
        )
    )


def _is_of(table: sa.Table, store: str) -> sa.ColumnElement[bool]:
    """Whether a process of a store may take a note."""
    return table.c.store.in_(("", store)) if store else sa.true()
