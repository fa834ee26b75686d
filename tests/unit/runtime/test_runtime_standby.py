"""A primary that is gone, seen from a pod that knows its standby."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.postgres import FAST, PostgresServer, new_server

from tinsmith_runtime.sql.postgres_sessions import PassingError, PostgresTarget


@pytest.fixture
def pair() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    primary = new_server(FAST)
    try:
        standby = primary.make_standby(primary.folder.with_name(f"{primary.folder.name}-standby"))
        yield primary, standby
        standby.remove()
    finally:
        primary.remove()


async def test_a_standby_that_takes_no_writes_yet_is_waited_for(
    pair: tuple[PostgresServer, PostgresServer],
) -> None:
    primary, standby = pair
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    url = primary.url.replace(f"127.0.0.1:{primary.port}", hosts)
    target = PostgresTarget(url=url, schema="test", application_name="test")
    primary.kill()
    with pytest.raises(PassingError, match="read-write"):
        await target.connect(is_leading=True)
    standby.promote()
    session = await target.connect(is_leading=True)
    assert not await session.fetchval("SELECT pg_is_in_recovery()")
    await session.close()
