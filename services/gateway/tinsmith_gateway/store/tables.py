"""Tables of the gateway: what HTTP clients were promised and no other pod knows.

Operations of runs are not here: their futures are names of operations, which the trainer keeps.
"""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith_runtime.sql import Store

SCHEMA_VERSION = 1
"""The number of the last migration; a change of the tables adds one."""

metadata = sa.MetaData()
STORE = Store("gateway", metadata, SCHEMA_VERSION)

# What clients of the Tinker wire were promised: samples, and why something that
# could not be put into native words was refused.
futures = sa.Table(
    "futures",
    metadata,
    # Clients compute parts of an id, so it is one of its project alone: what one project promises
    # must not stand in the way of another.
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("future", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    # The sampling session or model that it belongs to; empty for none.
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("request", sa.LargeBinary, nullable=False),
    # Empty until it is finished.
    sa.Column("result", sa.LargeBinary),
    sa.Column("error", sa.LargeBinary),
    # Orders the ends of the futures of an owner; 0 before.
    sa.Column("revision", sa.BigInteger, nullable=False, default=0),
    sa.Column("create_time_s", sa.Float, nullable=False),
    sa.Column("finish_time_s", sa.Float),
    # When a client first got the result; empty until then.
    sa.Column("retrieve_time_s", sa.Float),
    sa.Index("futures_by_end", "owner", "revision"),
    sa.Index("futures_by_retention", "retrieve_time_s", "finish_time_s"),
)

# What was used, by hour: for people who share a deployment, not for invoices.
usage = sa.Table(
    "usage",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("hour_s", sa.BigInteger, primary_key=True),
    sa.Column("session", sa.Text, primary_key=True),
    sa.Column("base_model", sa.Text, primary_key=True),
    # training, sampling_prefill, sampling_prefill_cached, sampling_sample or checkpoint.
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("count", sa.BigInteger, nullable=False),
)
