"""Shared by the tests of the runtime."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.support.postgres_notes import open_database

from tinsmith_runtime.sql import PostgresDatabase

pytest.register_assert_rewrite("tests.unit.runtime.ledger_suite")


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[PostgresDatabase]:
    database = await open_database(postgres_url)
    yield database
    await database.close()
