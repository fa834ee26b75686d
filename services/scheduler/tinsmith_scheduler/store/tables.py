"""Tables of the scheduler.

Names of resources are whole (`projects/...`), so that a row cannot be read without its project.
`serial` columns order lists: creation times can be equal, serials cannot. Those of sessions count
within a project, those of sampling sessions within a session; the one writer assigns them.
"""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith_runtime.sql import Store

SCHEMA_VERSION = 14
"""The number of the last migration; a change of the tables adds one."""
MIGRATIONS = "tinsmith_scheduler.store.migrations"

metadata = sa.MetaData()
STORE = Store("scheduler", metadata, SCHEMA_VERSION, MIGRATIONS)

projects = sa.Table(
    "projects",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("create_time_s", sa.Float, nullable=False),
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("key_id", sa.Text, nullable=False, unique=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("secret_sha256", sa.LargeBinary, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("display_name", sa.Text, nullable=False),
    sa.Column("create_time_s", sa.Float, nullable=False),
    # The workers that the key is bound to; empty for the shared ones.
    sa.Column("pool", sa.Text, nullable=False, default="", server_default=""),
    # The job whose driver has the key, and which one of the name; empty for a user's.
    sa.Column("job", sa.Text, nullable=False, default="", server_default=""),
    sa.Column("job_uid", sa.Text, nullable=False, default="", server_default=""),
    # Seconds since the epoch; null for a key that does not expire.
    sa.Column("expire_time_s", sa.Float),
    # When a sweep first found it revoked.
    sa.Column("end_time_s", sa.Float),
    sa.Index("keys_by_state", "state", "end_time_s"),
    sa.Index("keys_by_expiry", "expire_time_s"),
    sqlite_autoincrement=True,
)

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("display_name", sa.Text, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("client_version", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False, default=""),
    sa.Column("create_time_s", sa.Float, nullable=False),
    sa.Column("serial", sa.Integer, nullable=False, server_default="0"),
    sa.Column("pool", sa.Text, nullable=False, default="", server_default=""),
    # When a sweep first found it ended.
    sa.Column("end_time_s", sa.Float),
    sa.Index("sessions_by_state", "state", "end_time_s"),
    sa.Index("sessions_by_project", "project", "serial", unique=True),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("session", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("adapter", sa.Text, nullable=False),
    sa.Column("display_name", sa.Text, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("create_time_s", sa.Float, nullable=False),
    # Empty until a trainer was chosen; kept while it is not known whether that trainer adopted it.
    sa.Column("worker", sa.Text, nullable=False, default=""),
    # Which process of the trainer, and the ledger that it shares; empty where runs do not move.
    sa.Column("incarnation", sa.Text, nullable=False, default="", server_default=""),
    sa.Column("ledger", sa.Text, nullable=False, default="", server_default=""),
    sa.Column("epoch", sa.BigInteger, nullable=False, default=0),
    sa.Column("encoded_error", sa.LargeBinary, nullable=False, default=b""),
    sa.Column("source_checkpoint", sa.Text, nullable=False, default="", server_default=""),
    sa.Column(
        "include_optimizer", sa.Boolean, nullable=False, default=False, server_default=sa.false()
    ),
    sa.Column("pool", sa.Text, nullable=False, default="", server_default=""),
    # Of a fork: which run, at which step, and the first operation that is executed anew.
    sa.Column("source_run", sa.Text, nullable=False, default="", server_default=""),
    sa.Column("source_step", sa.BigInteger, nullable=False, default=0, server_default="0"),
    sa.Column("reruns_step", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    sa.Column("rerun_from", sa.BigInteger, nullable=False, default=0, server_default="0"),
    # How long its past is kept after an operation ended; 0 is the default.
    sa.Column("history_retention_s", sa.Float, nullable=False, default=0.0, server_default="0"),
    # When its training was done, as its client said, and the last operation of that.
    sa.Column("finish_time_s", sa.Float),
    sa.Column(
        "finish_sequence_number", sa.BigInteger, nullable=False, default=0, server_default="0"
    ),
    # The session in which its training went on; empty for that of its creation.
    sa.Column("reopened_in", sa.Text, nullable=False, default="", server_default=""),
    sa.Index("runs_by_project", "project", "serial"),
    sa.Index("runs_by_session", "session"),
    sa.Index("runs_by_worker", "worker", "state"),
    # When a sweep first found it failed or deleted.
    sa.Column("end_time_s", sa.Float),
    sa.Index("runs_by_state", "state", "end_time_s"),
    sqlite_autoincrement=True,
)

sampling_sessions = sa.Table(
    "sampling_sessions",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("session", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("checkpoint", sa.Text, nullable=False),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("serial", sa.Integer, nullable=False, server_default="0"),
    sa.Column("pool", sa.Text, nullable=False, default="", server_default=""),
    sa.Index("sampling_sessions_by_session", "session", "serial", unique=True),
)

# Releases that a trainer has not confirmed yet.
releases = sa.Table(
    "releases",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("worker", sa.Text, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
)

requests = sa.Table(
    "requests",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("response", sa.LargeBinary, nullable=False),
    sa.Column("create_time_s", sa.Float, nullable=False),
    sa.Index("requests_by_time", "create_time_s"),
)

# Base models that a worker has served: after a restart of the scheduler they are known before
# their workers are back.
models = sa.Table("models", metadata, sa.Column("base_model", sa.Text, primary_key=True))

# What the driver of a job reported last. The row is made with the key of the job.
job_reports = sa.Table(
    "job_reports",
    metadata,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("uid", sa.Text, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("max_steps", sa.BigInteger, nullable=False),
    sa.Column("metrics", sa.JSON, nullable=False),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("checkpoint", sa.Text, nullable=False),
    sa.Column("checkpoint_step", sa.BigInteger, nullable=False),
    sa.Column("state", sa.LargeBinary, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("update_time_s", sa.Float, nullable=True),
    sa.Column("step_time_s", sa.Float, nullable=True),
    sa.Column(
        "replay_diverged", sa.Boolean, nullable=False, default=False, server_default=sa.false()
    ),
)

# The jobs that this scheduler runs itself, on one machine. In a cluster they are its resources.
jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("uid", sa.Text, nullable=False),
    # As in the resource of the cluster.
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("status", sa.JSON, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    # Tells a repeated creation from another job of the name.
    sa.Column("request_digest", sa.LargeBinary, nullable=False),
    sa.Column("create_time_s", sa.Float, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Index("jobs_by_project", "project", "serial"),
    sqlite_autoincrement=True,
)

# A metric of a run. Its points are in blocks of 128 steps, each with a summary in a row that is
# short, so that long curves are read without their points.
metric_series = sa.Table(
    "metric_series",
    metadata,
    sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("num_points", sa.BigInteger, nullable=False),
    # About what its blocks take.
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("last_step", sa.BigInteger, nullable=False),
    # Null for no number.
    sa.Column("last_value", sa.Float),
    sa.Column("update_time_s", sa.Float, nullable=False),
    # Counts the recordings of the run, up to the last one that changed the metric.
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Index("metric_series_by_run", "run", "name", unique=True),
    sa.Index("metric_series_by_project", "project", "run", "name"),
    sqlite_autoincrement=True,
)

metric_blocks = sa.Table(
    "metric_blocks",
    metadata,
    sa.Column("series", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("block", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("num_points", sa.Integer, nullable=False),
    sa.Column("num_finite", sa.Integer, nullable=False),
    sa.Column("total", sa.Float, nullable=False),
    # Null without a finite value.
    sa.Column("minimum", sa.Float),
    sa.Column("maximum", sa.Float),
    sa.Column("time_s", sa.Float, nullable=False),
)

metric_points = sa.Table(
    "metric_points",
    metadata,
    sa.Column("series", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("block", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("points", sa.LargeBinary, nullable=False),
)

# What the metrics of each project take.
metric_usage = sa.Table(
    "metric_usage",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
)

# What was used: totals of each source, which never sink.
usage_rows = sa.Table(
    "usage_rows",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("day", sa.BigInteger, primary_key=True),
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    # A ledger, or one process of a sampler.
    sa.Column("source", sa.Text, primary_key=True),
    sa.Column("num_trained_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_sampled_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_prefilled_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("engine_s", sa.Float, nullable=False),
)

# The sums of these rows, which budgets are compared with each second.
usage_days = sa.Table(
    "usage_days",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("day", sa.BigInteger, primary_key=True),
    sa.Column("num_trained_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_sampled_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_prefilled_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("engine_s", sa.Float, nullable=False),
)

# What checkpoints and exports of runs take now.
usage_stored = sa.Table(
    "usage_stored",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("source", sa.Text, primary_key=True),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
)

budgets = sa.Table(
    "budgets",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("quantity", sa.Text, primary_key=True),
    sa.Column("budget", sa.Float, nullable=False),
    sa.Column("period", sa.Text, nullable=False),
)

# One row for each management action. The project is that of the resource, not of the caller.
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("time_s", sa.Float, nullable=False),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("resource", sa.Text, nullable=False),
    sa.Index("audit_by_project", "project", "serial"),
)
