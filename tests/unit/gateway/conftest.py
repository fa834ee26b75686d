"""What tests of the gateway's store share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tinsmith_gateway.store.tables import STORE
from tinsmith_runtime.sql import Database, open_store


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_store(STORE, tmp_path)
    yield opened
    await opened.close()
