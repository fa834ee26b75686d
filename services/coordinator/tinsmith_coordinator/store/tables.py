"""Tables of the coordinator.

An episode is one row through all its attempts; `serial` is its place in the queue, which a lost
lease does not change. Secrets of an attempt are kept as hashes. Rows of attempts stay as long as
their episode, so that an expired token is told from an unknown one.

A match is a row with one row for each seat. Its games and their moves are kept for the current
epoch and the one before.

A batch of rollouts is a row with one row for each play that ended. Plays that go on are not kept:
they begin again with their seeds.
"""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith_runtime.sql import Store

SCHEMA_VERSION = 3
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

# What is agreed of a match is one value: it is never searched for, and never changes.
matches = sa.Table(
    "matches",
    metadata,
    sa.Column("serial", _Serial, primary_key=True, autoincrement=True),
    sa.Column("match_id", sa.Text, nullable=False, unique=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("request_digest", sa.LargeBinary, nullable=False),
    sa.Column("rules", sa.JSON, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("num_opened", sa.BigInteger, nullable=False),
    sa.Column("num_open_games", sa.Integer, nullable=False),
    sa.Column("deadline_s", sa.Float(53), nullable=True),
    sa.Column("failure", sa.Text, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("create_time_s", sa.Float(53), nullable=False),
    sa.Column("end_time_s", sa.Float(53), nullable=True),
    sa.Index("matches_by_project", "project", "serial"),
    sa.Index("matches_by_request", "project", "request_id", unique=True),
    sa.Index("matches_by_deadline", "deadline_s"),
    sa.Index("matches_by_end", "end_time_s"),
    sqlite_autoincrement=True,
)

members = sa.Table(
    "members",
    metadata,
    sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("agent", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("client_id", sa.Text, nullable=False),
    sa.Column("num_joins", sa.Integer, nullable=False),
    sa.Column("lease_expire_s", sa.Float(53), nullable=True),
    sa.Column("arrived", sa.BigInteger, nullable=False),
    sa.Column("failure", sa.Text, nullable=False),
    sa.Column("request_sha256", sa.LargeBinary, nullable=False),
    sa.Column("salt", sa.LargeBinary, nullable=False),
    sa.Column("token_sha256", sa.LargeBinary, nullable=False),
    sa.Index("members_by_lease", "lease_expire_s"),
)

games = sa.Table(
    "games",
    metadata,
    sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("game", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("turn", sa.Integer, nullable=False),
    sa.Column("running", sa.JSON, nullable=False),
    sa.Column("rewards", sa.JSON, nullable=False),
    sa.Column("failure", sa.Text, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("deadline_s", sa.Float(53), nullable=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Index("games_by_revision", "serial", "revision"),
    sa.Index("games_by_deadline", "deadline_s"),
)

# A move is shown from its revision on; 0 while others move in the same turn.
moves = sa.Table(
    "moves",
    metadata,
    sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("game", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("turn", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("agent", sa.Text, primary_key=True),
    sa.Column("action_json", sa.Text, nullable=False),
    sa.Column("verdict", sa.JSON, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Index("moves_by_revision", "serial", "revision"),
)

# The request is kept as it came, and never searched in.
rollout_batches = sa.Table(
    "rollout_batches",
    metadata,
    sa.Column("serial", _Serial, primary_key=True, autoincrement=True),
    sa.Column("batch_id", sa.Text, nullable=False, unique=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("request_digest", sa.LargeBinary, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Column("num_tasks", sa.Integer, nullable=False),
    sa.Column("groups", sa.JSON, nullable=False),
    sa.Column("num_episodes", sa.BigInteger, nullable=False),
    sa.Column("num_tokens", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("report", sa.JSON, nullable=False),
    sa.Column("taken", sa.JSON, nullable=False),
    sa.Column("failure", sa.JSON, nullable=True),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("deadline_s", sa.Float(53), nullable=False),
    sa.Column("create_time_s", sa.Float(53), nullable=False),
    sa.Column("end_time_s", sa.Float(53), nullable=True),
    sa.Index("rollout_batches_by_project", "project", "serial"),
    sa.Index("rollout_batches_by_request", "project", "request_id", unique=True),
    sa.Index("rollout_batches_by_state", "state"),
    sa.Index("rollout_batches_by_end", "end_time_s"),
    sqlite_autoincrement=True,
)

rollout_episodes = sa.Table(
    "rollout_episodes",
    metadata,
    sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("task", sa.Integer, nullable=False),
    sa.Column("member", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("problem", sa.Text, nullable=False),
    sa.Column("may_repeat", sa.Boolean, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
)
