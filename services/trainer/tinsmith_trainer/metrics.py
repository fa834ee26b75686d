"""Metrics of the trainer pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

OPERATION_SECONDS = Histogram(
    "tinsmith_trainer_operation_duration_seconds",
    "Time on the engine of one operation.",
    ["kind"],
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
OPERATIONS = Counter(
    "tinsmith_trainer_operations_total", "Operations that ended.", ["kind", "outcome"]
)
QUEUED_OPERATIONS = Gauge("tinsmith_trainer_queued_operations", "Operations accepted, not ended.")
TRAINED_TOKENS = Counter("tinsmith_trainer_trained_tokens_total", "Tokens of forward_backward.")
RESIDENT_RUNS = Gauge("tinsmith_trainer_resident_runs", "Runs in memory.")
REPLAYED_OPERATIONS = Counter(
    "tinsmith_trainer_replayed_operations_total", "Operations computed again.", ["outcome"]
)
SNAPSHOT_BYTES = Counter("tinsmith_trainer_snapshot_bytes_total", "Bytes of snapshots written.")
