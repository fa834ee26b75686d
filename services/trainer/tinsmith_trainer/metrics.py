"""Metrics of the trainer pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from tinsmith_runtime.observability.run_series import RUN_LABELS

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
    "What was dropped in time: a `result`, a `request` or a `snapshot` that no replay needs, a "
    "`row`, a `file`, an `audit_event`.",
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

QUEUE_WAIT_SECONDS = Histogram(
    "tinsmith_trainer_queue_wait_seconds",
    "Time from the acknowledgement of an operation to the cycle that computes it.",
    ["kind"],
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
ENGINE_SECONDS = Counter(
    "tinsmith_trainer_engine_seconds_total",
    "Time that the engines computed, by part: `passes` over batches, `steps` of the optimizer.",
    ["part"],
)
COMMIT_SECONDS = Histogram(
    "tinsmith_trainer_commit_duration_seconds",
    "Time from the end of a cycle on the engine until its results are durable.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
RESTORE_SECONDS = Histogram(
    "tinsmith_trainer_restore_duration_seconds",
    "Time to bring a run into the engine: the wait for a slot, the copy and the replay.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
PARKED_RUNS = Counter(
    "tinsmith_trainer_parked_runs_total", "Runs taken out of the engine to make room."
)
DATA_FREE_BYTES = Gauge(
    "tinsmith_trainer_data_free_bytes", "Free space where the trainer keeps its data."
)
DATA_SIZE_BYTES = Gauge(
    "tinsmith_trainer_data_size_bytes", "Size of the file system of the trainer's data."
)

# By run, of the runs that were active last: `tinsmith_runtime.observability.run_series` has the
# bound. A gauge holds what the last operation that ended found.

RUN_VERSION = Gauge("tinsmith_run_version", "Optimizer steps applied to the run.", RUN_LABELS)
RUN_STEPS = Counter("tinsmith_run_steps_total", "Optimizer steps of the run.", RUN_LABELS)
RUN_TRAINED_TOKENS = Counter(
    "tinsmith_run_trained_tokens_total", "Tokens of the run's forward_backward.", RUN_LABELS
)
RUN_ENGINE_SECONDS = Counter(
    "tinsmith_run_engine_seconds_total", "The run's part of the time of the engine.", RUN_LABELS
)
RUN_QUEUE_WAIT_SECONDS = Counter(
    "tinsmith_run_queue_wait_seconds_total",
    "Time that the run's operations waited for their cycle.",
    RUN_LABELS,
)
RUN_OPERATIONS = Counter(
    "tinsmith_run_operations_total", "Operations of the run that ended.", [*RUN_LABELS, "outcome"]
)
RUN_FAILED_OPERATIONS = Counter(
    "tinsmith_run_failed_operations_total",
    "Operations of the run that failed, by reason.",
    [*RUN_LABELS, "reason"],
)
RUN_LOSS = Gauge(
    "tinsmith_run_loss", "Loss of the last forward_backward, by trained token.", RUN_LABELS
)
RUN_ENTROPY = Gauge(
    "tinsmith_run_entropy_nats",
    "Entropy of the policy by token, estimated from the sampled tokens.",
    RUN_LABELS,
)
RUN_KL = Gauge(
    "tinsmith_run_kl_nats",
    "KL(sampler || trainer) by token, by estimator: `v1`, the mean of q - lp, and `v2`, the mean "
    "of (q - lp)^2 / 2.",
    [*RUN_LABELS, "estimator"],
)
RUN_RATIO = Gauge(
    "tinsmith_run_importance_ratio",
    "Ratio of the probabilities of trainer and sampler by token: `mean` and `max`.",
    [*RUN_LABELS, "statistic"],
)
RUN_RATIO_TAIL = Gauge(
    "tinsmith_run_importance_ratio_tail_fraction",
    "Share of tokens whose importance ratio is beyond a factor of 2, up or down.",
    RUN_LABELS,
)
RUN_CLIP_FRACTION = Gauge(
    "tinsmith_run_clip_fraction",
    "Share of tokens that the loss clips, by side: `high` or `low`.",
    [*RUN_LABELS, "side"],
)
RUN_MISMATCH = Gauge(
    "tinsmith_run_mismatch_nats",
    "Largest difference between the log-probabilities of sampler and trainer.",
    RUN_LABELS,
)
RUN_ZERO_ADVANTAGE = Gauge(
    "tinsmith_run_zero_advantage_fraction",
    "Share of sequences without an advantage: nothing is learned from them.",
    RUN_LABELS,
)
RUN_TRAINED_SEQUENCE_TOKENS = Gauge(
    "tinsmith_run_trained_tokens_per_sequence",
    "Tokens with a loss of a sequence, their mean over the last batch.",
    RUN_LABELS,
)
RUN_GRADIENT_NORM = Gauge(
    "tinsmith_run_gradient_norm",
    "Norm of the gradient of the last step, before it is clipped.",
    RUN_LABELS,
)
RUN_LEARNING_RATE = Gauge(
    "tinsmith_run_learning_rate", "Learning rate of the last step.", RUN_LABELS
)
RUN_REPLAY_DIVERGED = Gauge(
    "tinsmith_run_replay_diverged",
    "1 for a run whose replay gave other bits than its first execution.",
    RUN_LABELS,
)
