"""Metrics of the trainer pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

OPERATION_SECONDS = Histogram(
    "tinsmith_trainer_operation_duration_seconds",
    "Time on the engine of one operation: its part of its cycle, by tokens.",
    ["kind"],
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
OPERATIONS = Counter(
    "tinsmith_trainer_operations_total", "Operations that ended.", ["kind", "outcome"]
)
QUEUED_OPERATIONS = Gauge("tinsmith_trainer_queued_operations", "Operations accepted, not ended.")
TRAINED_TOKENS = Counter("tinsmith_trainer_trained_tokens_total", "Tokens of forward_backward.")
PARKED_BYTES = Gauge("tinsmith_trainer_parked_bytes", "Host memory of parked runs.")
RESTORED_RUNS = Counter(
    "tinsmith_trainer_restored_runs_total", "Runs brought back into the engine.", ["source"]
)
RESIDENT_RUNS = Gauge("tinsmith_trainer_resident_runs", "Runs in memory.")
EXPIRED = Counter(
    "tinsmith_trainer_expired_total",
    "What was dropped in time: a `result`, a `request` that no replay needs, a `row`, a `file`, an "
    "`audit_event`.",
    ["what"],
)
REPLAYED_OPERATIONS = Counter(
    "tinsmith_trainer_replayed_operations_total", "Operations computed again.", ["outcome"]
)
SNAPSHOT_BYTES = Counter("tinsmith_trainer_snapshot_bytes_total", "Bytes of snapshots written.")
CYCLE_SECONDS = Histogram(
    "tinsmith_trainer_cycle_duration_seconds",
    "Time of one cycle on the engine, its commit not included.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
CYCLE_TOKENS = Histogram(
    "tinsmith_trainer_cycle_tokens",
    "Tokens computed in one cycle, of all runs.",
    buckets=(64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144),
)
CYCLE_RUNS = Histogram(
    "tinsmith_trainer_cycle_runs",
    "Runs that shared one cycle.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
)
WAITING_RUNS = Gauge(
    "tinsmith_trainer_waiting_runs",
    "Runs that have operations and are not computed: they wait for a `cycle` of the engine, for "
    "a `slot` of it or to be restored, or for a sequence `number` that has not arrived.",
    ["reason"],
)
COMPUTED_TOKENS_PER_SECOND = Gauge(
    "tinsmith_trainer_computed_tokens_per_second",
    "Pace of the engines while they compute, a moving average; retry hints are made of it.",
)

LEASE_AGE_SECONDS = Gauge(
    "tinsmith_trainer_lease_age_seconds", "Time since the lease on the shared ledger was renewed."
)

CHECKPOINT_TASKS = Counter(
    "tinsmith_trainer_checkpoint_tasks_total",
    "Copies, exports and imports of checkpoints that ended.",
    ["kind", "outcome"],
)

EXPIRED_CHECKPOINTS = Counter(
    "tinsmith_trainer_expired_checkpoints_total",
    "Checkpoints and exports that expired.",
)
