"""Tables of the ledger."""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA_VERSION = 9
"""The number of the last migration; a change of the tables adds one."""
MIGRATIONS = "tinsmith_runtime.ledger.migrations"

metadata = sa.MetaData()

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("adapter", sa.Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False, default=0),
    sa.Column("replay_diverged", sa.Boolean, nullable=False, default=False),
    # Revisions given to operations so far; the row's lock gives them out one after another.
    sa.Column("last_revision", sa.BigInteger, nullable=False, default=0, server_default="0"),
    # The object store of the trainer that adopted it last; empty if that is not known.
    sa.Column("store", sa.Text, nullable=False, default="", server_default=""),
    # How long its past is kept after an operation ended; 0 is the default.
    sa.Column("history_retention_s", sa.Float, nullable=False, default=0.0, server_default="0"),
)

# The fence: placement raises the epoch, every write of a trainer checks it and locks the row.
leases = sa.Table(
    "leases",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    # Empty if the run has no holder.
    sa.Column("holder", sa.Text, nullable=False, default="", server_default=""),
    # The rows of operations up to this number were deleted, the requests up to the other dropped.
    # They are here because a submit has to see them as they are once it has the lock of this row.
    sa.Column("expired_through", sa.BigInteger, nullable=False, default=0, server_default="0"),
    sa.Column("payloads_through", sa.BigInteger, nullable=False, default=0, server_default="0"),
    sa.Index("leases_by_holder", "holder"),
)

# Trainer processes on a shared database. Times are of the database's clock.
holders = sa.Table(
    "holders",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("worker", sa.Text, nullable=False),
    sa.Column("expire_time_s", sa.Float, nullable=False),
)

operations = sa.Table(
    "operations",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("sequence_number", sa.BigInteger, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    # Empty on a row that stands for a request which was not accepted under its own id.
    sa.Column("request_id", sa.Text),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("payload", sa.LargeBinary),
    sa.Column("payload_path", sa.Text),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("num_attempts", sa.Integer, nullable=False, default=0),
    sa.Column("plan", sa.Text),
    sa.Column("result", sa.LargeBinary),
    sa.Column("error", sa.LargeBinary),
    sa.Column("submit_time_s", sa.Float, nullable=False),
    sa.Column("finish_time_s", sa.Float),
    sa.Column("revision", sa.BigInteger, nullable=False, default=0),
    # When a client first got the result, about; empty until then.
    sa.Column("retrieve_time_s", sa.Float),
    # SHA-256 of a result that is not kept any more.
    sa.Column("result_digest", sa.LargeBinary),
    # What its sender could know when it was accepted.
    sa.Column("seen_through", sa.BigInteger, nullable=False, server_default="0"),
    # The key that it was sent with; empty on a row that is older than this column.
    sa.Column("key_id", sa.Text, nullable=False, default="", server_default=""),
    sa.UniqueConstraint("run", "request_id"),
    # An operation without a result has revision 0, so these are found here as well.
    sa.Index("operations_by_revision", "run", "revision", "sequence_number"),
)
# What is kept, by how long: a search for what is due must not read rows with their requests.
sa.Index(
    "operations_by_retention",
    operations.c.run,
    operations.c.retrieve_time_s,
    operations.c.finish_time_s,
    sqlite_where=operations.c.result.is_not(None) | operations.c.error.is_not(None),
    postgresql_where=operations.c.result.is_not(None) | operations.c.error.is_not(None),
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("sequence_number", sa.BigInteger, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("folder", sa.Text, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("create_time_s", sa.Float, nullable=False),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("adapter", sa.Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("sequence_number", sa.BigInteger, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("folder", sa.Text, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("create_time_s", sa.Float, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    # Empty: kept until it is deleted.
    sa.Column("expire_time_s", sa.Float),
    sa.Column("is_published", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    # Empty where the checkpoint is older than this column: its manifest names them.
    sa.Column("files", sa.JSON),
    sa.Column("source_checkpoint", sa.Text, nullable=False, default="", server_default=""),
    sa.Index("checkpoints_by_time", "project", "create_time_s", "name"),
    sa.Index("checkpoints_by_expiry", "expire_time_s"),
)

# Checkpoints that expired lately, so that "expired" differs from "never existed".
expired_checkpoints = sa.Table(
    "expired_checkpoints",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("expire_time_s", sa.Float, nullable=False),
)

# Checkpoints in the layout of other tools.
checkpoint_exports = sa.Table(
    "checkpoint_exports",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("checkpoint", sa.Text, nullable=False),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("format", sa.Text, nullable=False),
    sa.Column("folder", sa.Text, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("files", sa.JSON, nullable=False),
    sa.Column("create_time_s", sa.Float, nullable=False),
    sa.Column("expire_time_s", sa.Float, nullable=False),
    sa.Index("checkpoint_exports_by_checkpoint", "checkpoint"),
    sa.Index("checkpoint_exports_by_expiry", "expire_time_s"),
)

# Copies, exports and imports: operations that are in no run's order.
checkpoint_tasks = sa.Table(
    "checkpoint_tasks",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("checkpoint", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("result", sa.LargeBinary),
    sa.Column("error", sa.LargeBinary),
    sa.Column("submit_time_s", sa.Float, nullable=False),
    sa.Column("finish_time_s", sa.Float),
    # Whose event is written when the task ends; empty on a task older than this column.
    sa.Column("key_id", sa.Text, nullable=False, default="", server_default=""),
    sa.Index("checkpoint_tasks_by_state", "state", "project"),
)

# What the operations of a run used, by the key that sent them and the day of UTC. The transaction
# that commits their results adds to it. It outlives the run.
usage_totals = sa.Table(
    "usage_totals",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("day", sa.BigInteger, primary_key=True),
    sa.Column("num_trained_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_prefilled_tokens", sa.BigInteger, nullable=False),
    sa.Column("engine_s", sa.Float, nullable=False),
    # Whether the scheduler has this total.
    sa.Column("is_reported", sa.Boolean, nullable=False),
    sa.Index("usage_totals_by_report", "is_reported", "day"),
)

# One row for each management action on a checkpoint, by the transaction that makes the change.
audit_events = sa.Table(
    "audit_events",
    metadata,
    # SQLite numbers rows by itself under INTEGER alone.
    sa.Column(
        "serial",
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
        primary_key=True,
        autoincrement=True,
    ),
    sa.Column("time_s", sa.Float, nullable=False),
    # Of the resource, not of the caller.
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("resource", sa.Text, nullable=False),
    sa.Column("checkpoint_kind", sa.Text, nullable=False),
    sa.Index("audit_events_by_project", "project", "time_s", "serial"),
    sa.Index("audit_events_by_time", "time_s"),
)

# Folders of checkpoints and exports that are gone, but whose files may still be in the store.
folder_deletions = sa.Table(
    "folder_deletions",
    metadata,
    sa.Column("folder", sa.Text, primary_key=True),
    # The one that holds the files; empty on a note that is older than this column.
    sa.Column("store", sa.Text, primary_key=True, default="", server_default=""),
    # Readers in other processes get this long to finish.
    sa.Column("not_before_s", sa.Float, nullable=False),
)

# Deleted runs whose files may still be in the store.
deletions = sa.Table(
    "deletions",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    # As above.
    sa.Column("store", sa.Text, primary_key=True, default="", server_default=""),
)

# What is true of the whole database, such as the name by which trainers know that they share it.
facts = sa.Table(
    "facts",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
