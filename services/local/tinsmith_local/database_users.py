"""Users of PostgreSQL, one for each kind of pod that keeps its state there.

A pod owns the schema of its kind and reaches no other. One that was taken over reads neither the
hashes of keys nor what other kinds keep. Coordinators may make schemas, since those of a job's pool
have one of their own. Done again, the users stay and their passwords are new: sessions that are
open go on, and pods connect anew with what their Secret says by then.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.pod_identity import PodRole

SCHEMAS = {
    PodRole.SCHEDULER: "scheduler",
    PodRole.GATEWAY: "gateway",
    PodRole.COORDINATOR: "coordinator",
    PodRole.TRAINER: "ledger",
}
"""The schema of each kind of pod that has one."""
_PASSWORD_BYTES = 32
_CONNECT_TIMEOUT_S = 10.0
_STATEMENT_TIMEOUT_S = 60.0
_MAX_NAME_LENGTH = 40
# What a single user had made before belongs to the pod from now on, schemas of pools included.
_HAND_OVER = """
DO $$ DECLARE item record; BEGIN
    FOR item IN SELECT oid, nspname FROM pg_namespace
        WHERE nspname = '{schema}' OR nspname ~ '^{schema}_[0-9a-f]{{16}}$'
    LOOP
        EXECUTE format('ALTER SCHEMA %I OWNER TO %I', item.nspname, '{user}');
    END LOOP;
    FOR item IN SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n
        ON n.oid = c.relnamespace
        WHERE c.relkind IN ('r', 'p', 'v')
        AND (n.nspname = '{schema}' OR n.nspname ~ '^{schema}_[0-9a-f]{{16}}$')
    LOOP
        EXECUTE format('ALTER TABLE %I.%I OWNER TO %I', item.nspname, item.relname, '{user}');
    END LOOP;
END $$
"""


@dataclass(frozen=True, slots=True)
class DatabaseUser:
    """A user that was made.

    Attributes:
        role: The kind of pod.
        name: Of the user.
        schema: What it owns.
        url: What the pod is given as `database_url`.
    """

    role: PodRole
    name: str
    schema: str
    url: str = field(repr=False)


async def make_database_users(url: str, *, prefix: str = "tinsmith") -> list[DatabaseUser]:
    """Make or renew the user of each kind of pod, all of them or none.

    Args:
        url: `postgresql://...` of the database, with a user that may make others.
        prefix: Begins their names: users belong to a server, not to a database.

    Raises:
        ConfigError: If the URL or the prefix is wrong, the server cannot be reached, or its user
            may not make others.
    """
    if not (prefix.isascii() and prefix.isidentifier() and len(prefix) <= _MAX_NAME_LENGTH):
        raise ConfigError(f"{prefix!r} cannot begin the name of a database user")
    try:
        session = await asyncpg.connect(
            url,
            timeout=_CONNECT_TIMEOUT_S,
            command_timeout=_STATEMENT_TIMEOUT_S,
            target_session_attrs=SessionAttribute.read_write,
        )
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise ConfigError(f"the database cannot be reached: {error}") from error
    try:
        async with session.transaction():
            return await _make_all(session, url, prefix)
    except asyncpg.PostgresError as error:
        raise ConfigError(f"users cannot be made: {error}") from error
    finally:
        await session.close(timeout=_CONNECT_TIMEOUT_S)


async def _make_all(
    session: asyncpg.Connection[asyncpg.Record], url: str, prefix: str
) -> list[DatabaseUser]:
    database, admin = await session.fetchrow("SELECT current_database(), current_user") or ("", "")
    await session.execute(f'REVOKE ALL ON DATABASE "{database}" FROM PUBLIC')
    await session.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
    users = []
    for role, schema in SCHEMAS.items():
        name, password = f"{prefix}_{role}", secrets.token_urlsafe(_PASSWORD_BYTES)
        is_known = await session.fetchval("SELECT 1 FROM pg_roles WHERE rolname = $1", name)
        verb = "ALTER" if is_known else "CREATE"
        await session.execute(f"{verb} ROLE \"{name}\" LOGIN PASSWORD '{password}'")
        # Only a member hands things over; a superuser needs not be one.
        await session.execute(f'GRANT "{name}" TO "{admin}"')
        granted = "CONNECT, CREATE" if role is PodRole.COORDINATOR else "CONNECT"
        await session.execute(f'GRANT {granted} ON DATABASE "{database}" TO "{name}"')
        await session.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}" AUTHORIZATION "{name}"')
        await session.execute(_HAND_OVER.format(schema=schema, user=name))
        users.append(DatabaseUser(role, name, schema, _url_of(url, name, password)))
    return users


def _url_of(url: str, user: str, password: str) -> str:
    """Return a URL with another user."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(user)}:{password}@{hosts}"))
