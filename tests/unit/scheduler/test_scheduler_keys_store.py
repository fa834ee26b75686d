"""Keys of jobs, when the process that asks is killed while the database commits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tinsmith.names import JobName, KeyName
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.pod_identity import PodRole
from tinsmith_runtime.sql import Database, open_store
from tinsmith_scheduler.auth.api_keys import Keys
from tinsmith_scheduler.store.records import KeyState, NewJobKey
from tinsmith_scheduler.store.tables import STORE

CALLER = Caller("", PodRole.SCHEDULER, "pod")
NEW = NewJobKey(JobName("p", "j"), "uid", "key-id", b"\x01" * 32)

ResultT = TypeVar("ResultT")


class Hasty:
    """A database whose next caller is gone once its write is committed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.is_hasty = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    async def write(self, act: Callable[[Any], ResultT]) -> ResultT:
        result = await self._database.write(act)
        if self.is_hasty:
            self.is_hasty = False
            raise asyncio.CancelledError
        return result


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Hasty]:
    database = await open_store(STORE, tmp_path)
    yield Hasty(database)
    await database.close()


def open_keys(database: Hasty) -> Keys:
    store: Any = database
    return Keys(store, operator_project="p", wall_clock=lambda: 1.0, pod_roots=["root"])


async def test_a_key_that_was_committed_for_nobody_is_found_again(database: Hasty) -> None:
    keys = open_keys(database)
    database.is_hasty = True
    with pytest.raises(asyncio.CancelledError):
        await keys.ensure_job_key(NEW, CALLER)

    assert (await keys.ensure_job_key(NEW, CALLER)).state is KeyState.ACTIVE
    revoked = await keys.revoke_job_key(KeyName("p", NEW.key_id), CALLER)
    assert revoked.state is KeyState.REVOKED


async def test_a_key_whose_end_is_not_known_is_revoked_again(database: Hasty) -> None:
    keys = open_keys(database)
    await keys.ensure_job_key(NEW, CALLER)
    database.is_hasty = True
    name = KeyName("p", NEW.key_id)
    with pytest.raises(asyncio.CancelledError):
        await keys.revoke_job_key(name, CALLER)

    assert (await keys.revoke_job_key(name, CALLER)).state is KeyState.REVOKED
    again = open_keys(database)
    await again.load()
    assert (await again.ensure_job_key(NEW, CALLER)).state is KeyState.REVOKED
