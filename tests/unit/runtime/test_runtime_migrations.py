"""Databases of older releases: upgraded whatever they hold, to what a new one looks like."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.ext.asyncio import create_async_engine
from tests.unit.runtime.ledger_suite import checkpoint, operation, outcome, run_record, task

import tinsmith_runtime.ledger.tables as ledger_tables
import tinsmith_scheduler.store.tables as scheduler_tables
from tinsmith_coordinator.store import tables as coordinator_tables
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.ledger import Holder, Ledger, PostgresLedger, SqliteLedger
from tinsmith_runtime.sql import open_store
from tinsmith_runtime.sql.schema_versions import prepare_schema, read_version, upgrade
from tinsmith_scheduler.runs import run_store

RUN = "projects/p/trainingRuns/r"
Statements = Callable[[sa.Connection], Any]

_PLACES = {
    ledger_tables: ("ledger", "ledger.db"),
    scheduler_tables: ("scheduler", "scheduler.sqlite"),
    coordinator_tables: ("coordinator", "coordinator.sqlite"),
}
"""Where each pod keeps its tables: a schema of a server, or a file."""
_TASK_FIELDS = ("name", "run", "kind", "checkpoint", "digest", "payload", "submit_time_s")


class Target:
    """A database to build and look into, on the one or the other server."""

    def __init__(self, tables: ModuleType, folder: Path, url: str) -> None:
        self.tables, self.folder, self.url = tables, folder, url
        self._schema, file = _PLACES[tables]
        self._path = folder / file

    async def run(self, statements: Statements) -> Any:
        """Run statements in a transaction."""
        if not self.url:
            engine = sa.create_engine(f"sqlite:///{self._path}", isolation_level="AUTOCOMMIT")
            with contextlib.closing(engine.connect()) as connection:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                try:
                    result = statements(connection)
                    connection.exec_driver_sql("COMMIT")
                finally:
                    engine.dispose()
            return result
        schema = self._schema
        async_engine = create_async_engine(
            self.url.replace("postgresql:", "postgresql+asyncpg:"),
            connect_args={"server_settings": {"search_path": schema}},
        )
        try:
            async with async_engine.connect() as connection:
                await connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
                await connection.commit()
            # Another connection, which finds the schema when it looks for its default.
            await async_engine.dispose()
            async with async_engine.begin() as connection:
                return await connection.run_sync(statements)
        finally:
            await async_engine.dispose()

    async def make_first_release(self) -> None:
        """Leave the tables of the first release, which on SQLite did not know Alembic."""

        def make(connection: sa.Connection) -> None:
            upgrade(connection, self.tables.MIGRATIONS, from_version=None, to_version=1)
            if not self.url:
                connection.exec_driver_sql("DROP TABLE alembic_version")

        await self.run(make)

    async def insert(self, table: str, **values: Any) -> None:
        """Insert a row into a table as the first release had it."""
        reflected = sa.table(table, *(sa.column(name) for name in values))
        await self.run(lambda connection: connection.execute(sa.insert(reflected).values(**values)))

    def prepare(self, connection: sa.Connection, **changes: Any) -> None:
        """Do what opening the database does."""
        options = {
            "name": "the database",
            "schema_version": self.tables.SCHEMA_VERSION,
            "migrations": self.tables.MIGRATIONS,
        }
        prepare_schema(connection, self.tables.metadata, **{**options, **changes})

    def ledger(self) -> Ledger:
        """Return the ledger, which is to be opened."""
        if self.url:
            return PostgresLedger(self.url, holder=Holder("trainer-0", "only"))
        return SqliteLedger(self._path)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=list(_PLACES), ids=[schema for schema, _ in _PLACES.values()])
def target(request: pytest.FixtureRequest, tmp_path: Path, url: str) -> Target:
    return Target(request.param, tmp_path, url)


@pytest.fixture
def ledger_target(tmp_path: Path, url: str) -> Target:
    return Target(ledger_tables, tmp_path, url)


@pytest.fixture
def scheduler_target(tmp_path: Path, url: str) -> Target:
    return Target(scheduler_tables, tmp_path, url)


def differences(connection: sa.Connection, tables: ModuleType) -> list[Any]:
    # Of SQLite, Alembic takes an empty default for none.
    is_postgres = connection.dialect.name == "postgresql"
    options = {"compare_type": True, "compare_server_default": is_postgres}
    context = MigrationContext.configure(connection, opts=options)
    found = list(compare_metadata(context, tables.metadata))
    # Nor does it compare keys.
    for table in tables.metadata.sorted_tables:
        wanted = [column.name for column in table.primary_key]
        inspected = sa.inspect(connection).get_pk_constraint(table.name)["constrained_columns"]
        if inspected != wanted or is_counted(connection, table) != counts(table, is_postgres):
            found.append((table.name, inspected))
    return found


def counts(table: sa.Table, is_postgres: bool) -> bool:
    """Whether a server is to draw the keys of a table, and none twice."""
    if is_postgres:
        return table.autoincrement_column is not None
    return bool(table.dialect_options["sqlite"]["autoincrement"])


def is_counted(connection: sa.Connection, table: sa.Table) -> bool:
    """Whether it does."""
    if connection.dialect.name == "postgresql":
        columns = sa.inspect(connection).get_columns(table.name)
        return any(column["autoincrement"] for column in columns)
    query = "SELECT sql FROM sqlite_master WHERE name = ?"
    made: str = connection.exec_driver_sql(query, (table.name,)).scalar_one()
    return "AUTOINCREMENT" in made


@pytest.mark.parametrize("from_version", [None, 1])
async def test_migrations_lead_to_the_tables_of_a_new_database(
    target: Target, from_version: int | None
) -> None:
    head = target.tables.SCHEMA_VERSION

    def migrate(connection: sa.Connection) -> list[Any]:
        if from_version is None:
            upgrade(
                connection, target.tables.MIGRATIONS, from_version=from_version, to_version=head
            )
        target.prepare(connection)
        assert read_version(connection) == head
        return differences(connection, target.tables)

    if from_version is not None:
        await target.make_first_release()
    assert await target.run(migrate) == []


async def test_a_new_database_is_at_the_last_version(target: Target) -> None:
    def create(connection: sa.Connection) -> list[Any]:
        target.prepare(connection)
        target.prepare(connection)
        return differences(connection, target.tables)

    assert await target.run(create) == []
    version = await target.run(read_version)
    package = Path(sys.modules[target.tables.__name__].__file__ or "").parent
    scripts = sorted((package / "migrations" / "versions").glob("v[0-9]*.py"))
    assert version == len(scripts) == int(scripts[-1].name[1:5])
    if not target.url:
        # Where the first release looks.
        found = await target.run(
            lambda connection: connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        )
        assert found == version


async def test_a_newer_database_is_refused(target: Target) -> None:
    newer = target.tables.SCHEMA_VERSION + 1
    await target.run(lambda connection: target.prepare(connection, schema_version=newer))
    with pytest.raises(ConfigError, match=f"has schema version {newer}, this release reads"):
        await target.run(target.prepare)


async def test_an_upgrade_that_fails_changes_nothing(scheduler_target: Target) -> None:
    await scheduler_target.make_first_release()

    def spoil(connection: sa.Connection) -> None:
        connection.exec_driver_sql("ALTER TABLE runs ADD COLUMN ledger TEXT")

    def columns(connection: sa.Connection) -> set[str]:
        return {column["name"] for column in sa.inspect(connection).get_columns("runs")}

    await scheduler_target.run(spoil)
    before = await scheduler_target.run(columns)
    with pytest.raises(sa.exc.DBAPIError, match="ledger"):
        await scheduler_target.run(scheduler_target.prepare)
    assert await scheduler_target.run(columns) == before
    assert await scheduler_target.run(read_version) == 1


async def test_a_ledger_of_the_first_release_goes_on(ledger_target: Target) -> None:
    await ledger_target.make_first_release()
    await ledger_target.insert(
        "runs", name=RUN, base_model="tiny", adapter="{}", version=1, replay_diverged=False
    )
    await ledger_target.insert("leases", run=RUN, epoch=3)
    for number, revision in ((1, 1), (2, 2), (3, 0)):
        await ledger_target.insert(
            "operations",
            run=RUN,
            sequence_number=number,
            kind="optim_step",
            request_id=f"old-{number}",
            digest=b"d",
            state="succeeded" if revision else "pending",
            num_attempts=1,
            submit_time_s=5.0,
            revision=revision,
        )
    ledger = ledger_target.ledger()
    await ledger.open()
    assert await ledger.adopt_run(run_record(epoch=4)) == run_record(epoch=4, version=1)
    [finished] = await ledger.finish(RUN, 4, [outcome(3)])
    assert (finished.request_id, finished.revision) == ("old-3", 3)
    await ledger.submit(operation(4, epoch=4))
    point = await ledger.resume_point(RUN)
    assert (point.next_sequence_number, point.latest_revision) == (4, 3)
    await ledger.close()


async def test_a_task_that_waits_while_the_audit_trail_comes_ends_with_an_event(
    ledger_target: Target,
) -> None:
    await ledger_target.run(
        lambda connection: upgrade(
            connection, ledger_tables.MIGRATIONS, from_version=None, to_version=3
        )
    )
    await ledger_target.insert("leases", run=RUN, epoch=3)
    waiting = task("old")
    values = {field: getattr(waiting, field) for field in _TASK_FIELDS}
    await ledger_target.insert("checkpoint_tasks", project="p", state="pending", **values)
    ledger = ledger_target.ledger()
    await ledger.open()
    [found] = await ledger.list_pending_tasks()
    assert found == waiting
    made = checkpoint("c")
    await ledger.finish_task(found, 3, finish_time_s=9.0, result=b"r", checkpoint=made)
    [event] = await ledger.list_events("p", limit=9)
    assert (event.action, event.resource, event.key_id) == ("copy_checkpoint", made.name, "")
    await ledger.close()


async def test_checkpoints_that_were_kept_by_absolute_uris_are_kept_by_folder(
    ledger_target: Target,
) -> None:
    await ledger_target.run(
        lambda connection: upgrade(
            connection, ledger_tables.MIGRATIONS, from_version=None, to_version=4
        )
    )
    wanted = checkpoint("old")
    fields = ("name", "run", "kind", "base_model", "adapter", "version", "sequence_number")
    values = {field: getattr(wanted, field) for field in (*fields, "size_bytes", "sha256")}
    await ledger_target.insert(
        "checkpoints",
        **values,
        project="p",
        folder="projects/p/trainingRuns/r/checkpoints/training/old-1-e1",
        manifest_uri="file:///where/the/store/was/manifest.json",
        create_time_s=5.0,
        labels="{}",
    )
    ledger = ledger_target.ledger()
    await ledger.open()
    found = await ledger.get_checkpoint(wanted.name)
    assert found is not None
    assert found.folder == "projects/p/trainingRuns/r/checkpoints/training/old-1-e1"
    assert found.sha256 == wanted.sha256
    await ledger.close()


async def test_a_scheduler_of_the_first_release_goes_on(scheduler_target: Target) -> None:
    await scheduler_target.make_first_release()
    await scheduler_target.insert(
        "runs",
        name=RUN,
        project="p",
        state="active",
        session="s",
        base_model="tiny",
        adapter='{"kind": "full"}',
        display_name="",
        labels="{}",
        create_time_s=5.0,
        worker="workers/trainer-0",
        epoch=3,
        encoded_error=b"",
    )
    opened = await open_store(scheduler_tables.STORE, scheduler_target.folder, scheduler_target.url)
    run = await opened.read(lambda connection: run_store.get_run(connection, RUN))
    assert run is not None
    assert (run.worker, run.epoch, run.incarnation, run.ledger) == ("workers/trainer-0", 3, "", "")
    await opened.close()


async def test_lists_of_an_older_scheduler_are_in_order(scheduler_target: Target) -> None:
    await scheduler_target.make_first_release()
    for name, project, time_s in (("c", "p", 1.0), ("a", "p", 2.0), ("b", "q", 1.5)):
        await scheduler_target.insert(
            "sessions",
            name=f"projects/{project}/sessions/{name}",
            project=project,
            state="finished",
            display_name="",
            labels="{}",
            client_version="",
            outcome="success",
            create_time_s=time_s,
        )
    for number in range(2):
        await scheduler_target.insert(
            "sampling_sessions",
            name=f"projects/p/samplingSessions/{number}",
            project="p",
            session="projects/p/sessions/a",
            base_model="tiny",
            checkpoint="",
            run="",
        )
    for project in ("p", "q"):
        await scheduler_target.insert(
            "audit",
            time_s=1.0,
            project="p",
            key_id="k",
            action="create_key",
            resource=f"projects/{project}/keys/x",
        )
    await scheduler_target.run(scheduler_target.prepare)

    def read(connection: sa.Connection) -> list[Any]:
        tables = scheduler_tables
        queries = (
            sa.select(tables.sessions.c.name, tables.sessions.c.serial),
            sa.select(tables.sampling_sessions.c.serial),
            sa.select(tables.audit.c.project),
        )
        return [sorted(map(tuple, connection.execute(query))) for query in queries]

    assert await scheduler_target.run(read) == [
        [
            ("projects/p/sessions/a", 2),
            ("projects/p/sessions/c", 1),
            ("projects/q/sessions/b", 1),
        ],
        [(1,), (2,)],
        [("p",), ("q",)],
    ]


async def test_an_older_scheduler_draws_no_number_of_a_forgotten_key(
    scheduler_target: Target,
) -> None:
    await scheduler_target.make_first_release()
    for number in range(1, 4):
        await scheduler_target.insert(
            "keys",
            key_id=f"k{number}",
            project="p",
            secret_sha256=b"s",
            scopes='["admin"]',
            state="active",
            display_name="",
            create_time_s=5.0,
        )

    def forget(connection: sa.Connection) -> None:
        connection.exec_driver_sql("DELETE FROM keys WHERE key_id <> 'k1'")

    await scheduler_target.run(forget)
    await scheduler_target.run(scheduler_target.prepare)
    fields = {"project": "p", "secret_sha256": b"s", "role": "admin", "state": "active"}
    await scheduler_target.insert("keys", key_id="k4", display_name="", create_time_s=5.0, **fields)

    def read(connection: sa.Connection) -> list[Any]:
        keys = scheduler_tables.keys
        return sorted(map(tuple, connection.execute(sa.select(keys.c.key_id, keys.c.serial))))

    assert await scheduler_target.run(read) == [("k1", 1), ("k4", 4)]


def test_opening_a_new_file_does_not_wait_for_alembic(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys\n"
        "from tinsmith_runtime.ledger import SqliteLedger\n"
        "SqliteLedger(pathlib.Path(sys.argv[1]))\n"
        "assert 'alembic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "ledger.db"], check=True)
