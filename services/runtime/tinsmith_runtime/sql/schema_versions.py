"""Versions of a schema: new databases are created whole, older ones upgraded, newer ones refused.

The version of a database is the number of the last migration that it went through, `0001` for 1.
Alembic is loaded only where there is something to upgrade, because loading it takes longer than
opening a file.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import sqlalchemy as sa

from tinsmith_runtime.errors import ConfigError

# As Alembic makes it.
_versions = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def prepare_schema(
    connection: sa.Connection,
    metadata: sa.MetaData,
    *,
    name: str,
    schema_version: int,
    migrations: str = "",
) -> None:
    """Bring the tables of a database to a version, inside the transaction that the caller began.

    Args:
        connection: Held by one process at a time.
        metadata: The tables at that version.
        name: What messages call the database.
        schema_version: The version that this release reads.
        migrations: The package that holds `versions`; without one, older databases are refused.

    Raises:
        ConfigError: If the database is of a newer release, or older and cannot be upgraded.
    """
    found = read_version(connection)
    if found is None:
        metadata.create_all(connection)
        _write_version(connection, schema_version)
        return
    if found > schema_version or (found < schema_version and not migrations):
        raise ConfigError(
            f"{name} has schema version {found}, this release reads {schema_version}; use the "
            "release that wrote it, or another data folder"
        )
    if found < schema_version:
        upgrade(connection, migrations, from_version=found, to_version=schema_version)


def read_version(connection: sa.Connection) -> int | None:
    """Return the version of a database, None for one without tables."""
    if sa.inspect(connection).has_table(_versions.name):
        revision = connection.execute(sa.select(_versions.c.version_num)).scalar_one()
        return int(revision)
    if connection.dialect.name == "sqlite":
        # The first release kept its version here only.
        return connection.exec_driver_sql("PRAGMA user_version").scalar_one() or None
    return None


def upgrade(
    connection: sa.Connection, migrations: str, *, from_version: int | None, to_version: int
) -> None:
    """Run migrations on a database, inside the transaction that the caller began.

    Args:
        connection: Held by one process at a time.
        migrations: The package that holds `versions`.
        from_version: The version of the database, None if it is empty.
        to_version: The version to reach.
    """
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    logging.getLogger("alembic").setLevel(logging.WARNING)
    spec = importlib.util.find_spec(migrations)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    scripts = ScriptDirectory(str(folder), version_locations=[str(folder / "versions")])
    if from_version is not None:
        _write_version(connection, from_version)
    target = _revision(to_version)
    with EnvironmentContext(
        Config(),
        scripts,
        fn=lambda revision, _: scripts._upgrade_revs(target, revision),
        destination_rev=target,
    ) as environment:
        environment.configure(connection=connection)
        environment.run_migrations()
    _write_version(connection, to_version)


def _revision(version: int) -> str:
    return f"{version:04d}"


def _write_version(connection: sa.Connection, version: int) -> None:
    _versions.create(connection, checkfirst=True)
    connection.execute(sa.delete(_versions))
    connection.execute(sa.insert(_versions).values(version_num=_revision(version)))
    if connection.dialect.name == "sqlite":
        # Releases before this table read the version here, and refuse what they do not know.
        connection.exec_driver_sql(f"PRAGMA user_version={version:d}")
