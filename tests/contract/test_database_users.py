"""A user of PostgreSQL for each kind of pod: it works with its own schema and reaches no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from tests.fakes.postgres import PostgresServer

from tinsmith_coordinator.store.tables import STORE as COORDINATOR
from tinsmith_gateway.store.tables import STORE as GATEWAY
from tinsmith_local.database_users import SCHEMAS, DatabaseUser, make_database_users
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.ledger import Holder, PostgresLedger
from tinsmith_runtime.rpc.pod_identity import PodRole
from tinsmith_runtime.sql import Store, open_store
from tinsmith_scheduler.store.tables import STORE as SCHEDULER

_STORES = {
    PodRole.SCHEDULER: SCHEDULER,
    PodRole.GATEWAY: GATEWAY,
    PodRole.COORDINATOR: COORDINATOR,
}
_POOL = COORDINATOR.of_pool("pool-of-a-job")
_PREFIX = "of_a_test"


async def _work(url: str, store: Store, folder: Path) -> None:
    """Open the database of a pod as the pod does, and write."""
    database = await open_store(store, folder, url)
    try:
        names = await database.read(lambda connection: sorted(store.metadata.tables))
        assert names
    finally:
        await database.close()


async def _work_with_all(users: dict[PodRole, DatabaseUser], folder: Path) -> None:
    for role, store in _STORES.items():
        await _work(users[role].url, store, folder)
    await _work(users[PodRole.COORDINATOR].url, _POOL, folder)
    ledger = PostgresLedger(users[PodRole.TRAINER].url, holder=Holder("trainer-0", ""))
    await ledger.open()
    await ledger.close()


async def _refused(url: str, statement: str) -> bool:
    session = await asyncpg.connect(url)
    try:
        await session.execute(statement)
    except asyncpg.InsufficientPrivilegeError:
        return True
    finally:
        await session.close()
    return False


@pytest.fixture
async def users(postgres_url: str) -> dict[PodRole, DatabaseUser]:
    made = await make_database_users(postgres_url, prefix=_PREFIX)
    return {user.role: user for user in made}


async def test_each_pod_works_with_its_own(
    users: dict[PodRole, DatabaseUser], tmp_path: Path
) -> None:
    await _work_with_all(users, tmp_path)


async def test_no_pod_reaches_what_is_another_s(
    users: dict[PodRole, DatabaseUser], tmp_path: Path
) -> None:
    await _work_with_all(users, tmp_path)
    tables = {role: f"{SCHEMAS[role]}.tinsmith_writers" for role in SCHEMAS}
    for role, user in users.items():
        for owner, table in tables.items():
            for statement in (
                f"SELECT * FROM {table}",
                f"DELETE FROM {table}",
                f"CREATE TABLE {SCHEMAS[owner]}.mine (id int)",
            ):
                assert await _refused(user.url, statement) is (role is not owner), (role, statement)
                await _undo(users[owner].url, f"DROP TABLE IF EXISTS {SCHEMAS[owner]}.mine")
        assert await _refused(user.url, "CREATE TABLE public.mine (id int)")
        assert await _refused(user.url, "CREATE SCHEMA other") is (role is not PodRole.COORDINATOR)


async def _undo(url: str, statement: str) -> None:
    session = await asyncpg.connect(url)
    await session.execute(statement)
    await session.close()


async def test_a_database_that_one_user_had_is_handed_over(
    postgres_url: str, tmp_path: Path
) -> None:
    single = DatabaseUser(PodRole.SCHEDULER, "", "", postgres_url)
    await _work_with_all(dict.fromkeys(PodRole, single), tmp_path)
    made = await make_database_users(postgres_url, prefix=_PREFIX)
    await _work_with_all({user.role: user for user in made}, tmp_path)


async def test_made_again_users_stay_and_passwords_change(
    postgres_url: str, users: dict[PodRole, DatabaseUser]
) -> None:
    again = await make_database_users(postgres_url, prefix=_PREFIX)
    for user in again:
        known = users[user.role]
        assert (user.name, user.schema) == (known.name, known.schema)
        passwords = {urlsplit(each.url).password for each in (user, known)}
        assert len(passwords) == 2
        assert all(password and len(password) >= 40 for password in passwords)


async def test_a_password_is_needed(tmp_path: Path) -> None:
    # The server of the tests asks for none.
    server = await asyncio.to_thread(PostgresServer, tmp_path)
    try:
        await asyncio.to_thread(server.start)
        users = await make_database_users(server.url)
        (tmp_path / "data" / "pg_hba.conf").write_text(
            "host all tinsmith all trust\nhost all all all scram-sha-256\n"
        )
        await asyncio.to_thread(server.query, "SELECT pg_reload_conf()")
        for user in users:
            session = await asyncpg.connect(user.url)
            assert await session.fetchval("SELECT current_user") == user.name
            await session.close()
            wrong = user.url.replace(str(urlsplit(user.url).password), "another")
            with pytest.raises(asyncpg.InvalidPasswordError):
                await asyncpg.connect(wrong)
    finally:
        await asyncio.to_thread(server.remove)


@pytest.mark.parametrize("prefix", ["", "has space", 'quote"', "x" * 41])
async def test_a_prefix_that_is_no_name_is_refused(postgres_url: str, prefix: str) -> None:
    with pytest.raises(ConfigError, match="cannot begin the name"):
        await make_database_users(postgres_url, prefix=prefix)


async def test_a_user_that_may_not_make_others_is_told(
    users: dict[PodRole, DatabaseUser],
) -> None:
    with pytest.raises(ConfigError, match="users cannot be made: permission denied"):
        await make_database_users(users[PodRole.GATEWAY].url, prefix="another")


async def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        await make_database_users("postgresql://a:b@127.0.0.1:1/c")
