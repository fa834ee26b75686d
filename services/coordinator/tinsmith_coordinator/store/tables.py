"""Tables of the coordinator.

An episode is one row through all its attempts; `serial` is its place in the queue, which a lost
lease does not change. Secrets of an attempt are kept as hashes. Rows of attempts stay as long as
their episode, so that an expired token is told from an unknown one.
"""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith_runtime.sql import Store

SCHEMA_VERSION = 1
"""The number of the last migration; a change of the tables adds one."""
MIGRATIONS = "tinsmith_coordinator.store.migrations"

metadata = sa.MetaData()
STORE = Store("coordinator", metadata, SCHEMA_VERSION, MIGRATIONS)

# Serials are compared with those in page tokens, so that they must fit any count.
_Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")

episodes = sa.Table(
    "episodes",
    metadata,
    sa.Column("serial", _Serial, primary_key=True, autoincrement=True),
    sa.Column("episode_id", sa.Text, nullable=False, unique=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("queue", sa.Text, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("task_id", sa.Text, nullable=False),
    sa.Column("task_json", sa.Text, nullable=False),
    sa.Column("sampling_session", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("num_attempts", sa.Integer, nullable=False),
    sa.Column("max_attempts", sa.Integer, nullable=False),
    sa.Column("client_id", sa.Text, nullable=False),
    sa.Column("lease_expire_s", sa.Float(53), nullable=True),
    sa.Column("lease_duration_s", sa.Float(53), nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("failures", sa.JSON, nullable=False),
    sa.Column("num_model_calls", sa.Integer, nullable=False),
    sa.Column("trajectory_bytes", sa.BigInteger, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("create_time_s", sa.Float(53), nullable=False),
    sa.Column("end_time_s", sa.Float(53), nullable=True),
    sa.Index("episodes_by_queue", "project", "queue", "type", "state", "serial"),
    sa.Index("episodes_by_revision", "project", "queue", "revision"),
    sa.Index("episodes_by_project", "project", "serial"),
    sa.Index("episodes_by_holder", "project", "state", "client_id"),
    sa.Index("episodes_by_lease", "lease_expire_s"),
    sa.Index("episodes_by_end", "end_time_s"),
    sqlite_autoincrement=True,
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("project", sa.Text, nullable=False),
    # Not the request id itself: the secrets of the attempt are made of it.
    sa.Column("request_sha256", sa.LargeBinary, nullable=False),
    sa.Column("request_digest", sa.LargeBinary, nullable=False),
    sa.Column("salt", sa.LargeBinary, nullable=False),
    sa.Column("token_sha256", sa.LargeBinary, nullable=False),
    sa.Column("key_sha256", sa.LargeBinary, nullable=False),
    sa.Column("end", sa.Text, nullable=False),
    sa.Index("attempts_by_request", "project", "request_sha256", unique=True),
)

# Of the current attempt, or of the one that was submitted.
model_calls = sa.Table(
    "model_calls",
    metadata,
    sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("first_index", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Index("model_calls_by_request", "serial", "request_id", unique=True),
)

# Registrations: which episodes a request made.
requests = sa.Table(
    "requests",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("first_serial", sa.BigInteger, nullable=False),
    sa.Column("last_serial", sa.BigInteger, nullable=False),
    sa.Column("create_time_s", sa.Float(53), nullable=False),
    sa.Index("requests_by_time", "create_time_s"),
)

projects = sa.Table(
    "projects",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("last_revision", sa.BigInteger, nullable=False),
)
