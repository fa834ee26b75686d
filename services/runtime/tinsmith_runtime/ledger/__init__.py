"""The ledger: the table of operations and results, and the only commit point of a trainer.

An operation is acknowledged when its row is on disk, and done when its result is. Everything that a
crash may take, weights and moments included, can be computed again from these rows.

`Ledger` is asynchronous and speaks in whole decisions ("submit this, unless the number is taken"),
so that each is atomic whatever the database. `SqliteLedger` is one process on one machine,
`PostgresLedger` several that share a database.
"""

from __future__ import annotations

from tinsmith_runtime.ledger.deletion_statements import store_id
from tinsmith_runtime.ledger.history import EndedOperation, RunCopy, RunHistory
from tinsmith_runtime.ledger.postgres import PostgresLedger
from tinsmith_runtime.ledger.records import (
    Attempts,
    CheckpointChanges,
    CheckpointRecord,
    Commit,
    Cutoffs,
    Expired,
    ExportRecord,
    Holder,
    NewOperation,
    OperationOutcome,
    OperationRecord,
    OperationState,
    ResumePoint,
    RunRecord,
    SnapshotRecord,
    StoredFile,
    StoredKind,
    TaskRecord,
)
from tinsmith_runtime.ledger.sql_ledger import Ledger
from tinsmith_runtime.ledger.sqlite import SqliteLedger

__all__ = [
    "Attempts",
    "CheckpointChanges",
    "CheckpointRecord",
    "Commit",
    "Cutoffs",
    "EndedOperation",
    "Expired",
    "ExportRecord",
    "Holder",
    "Ledger",
    "NewOperation",
    "OperationOutcome",
    "OperationRecord",
    "OperationState",
    "PostgresLedger",
    "ResumePoint",
    "RunCopy",
    "RunHistory",
    "RunRecord",
    "SnapshotRecord",
    "SqliteLedger",
    "StoredFile",
    "StoredKind",
    "TaskRecord",
    "store_id",
]
