"""The database's connection is cut at every place of its opening; writes go on."""

from __future__ import annotations

import sqlalchemy as sa
from tests.fakes.postgres import PostgresServer
from tests.faults.proxy import Fault, FaultProxy

from tinsmith_runtime.sql.postgres import PostgresDatabase

METADATA = sa.MetaData()
NUMBERS = sa.Table("numbers", METADATA, sa.Column("number", sa.Integer, primary_key=True))
# What a server says until a session is ready to be used.
ANSWER_BYTES = range(0, 1500, 10)


async def test_a_session_that_is_cut_while_it_is_opened_is_opened_again(
    postgres: PostgresServer, postgres_url: str
) -> None:
    with FaultProxy("127.0.0.1", postgres.port) as proxy:
        url = postgres_url.replace(f":{postgres.port}/", f":{proxy.port}/")
        database = await PostgresDatabase.open(
            url, METADATA, schema="cuts", schema_version=1, reconnect_timeout_s=20.0
        )
        for num_bytes in ANSWER_BYTES:
            proxy.clear()
            proxy.add(Fault(cut_response_after=num_bytes, times=1))
            proxy.drop_connections()
            await database.write(
                lambda connection, n=num_bytes: connection.execute(
                    sa.insert(NUMBERS).values(number=n)
                )
            )
        rows = await database.read(
            lambda connection: connection.execute(sa.select(NUMBERS.c.number)).all()
        )
        assert sorted(number for (number,) in rows) == list(ANSWER_BYTES)
        await database.close()
