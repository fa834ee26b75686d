"""Metrics of the scheduler pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from tinsmith_runtime.observability.run_series import RUN_LABELS

WORKERS = Gauge("tinsmith_scheduler_workers", "Workers that are alive, by role.", ["role"])
ACTIVE_SESSIONS = Gauge("tinsmith_scheduler_active_sessions", "Sessions that are alive.")
ENDED_SESSIONS = Counter(
    "tinsmith_scheduler_ended_sessions_total", "Sessions that ended, by how.", ["state"]
)
PLACEMENT_SECONDS = Histogram(
    "tinsmith_scheduler_placement_duration_seconds",
    "Time from the creation of a run to the end of its placement.",
    ["outcome"],
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
WAITING_RUNS = Gauge("tinsmith_scheduler_waiting_runs", "Runs that wait to be placed.")
MOVING_RUNS = Gauge(
    "tinsmith_scheduler_moving_runs", "Runs whose trainer is gone, on their way to another one."
)
MOVED_RUNS = Counter("tinsmith_scheduler_moved_runs_total", "Runs that another trainer took over.")
PENDING_RELEASES = Gauge(
    "tinsmith_scheduler_pending_releases", "Releases that a trainer has not confirmed."
)
NEXT_KEY_EXPIRY = Gauge(
    "tinsmith_scheduler_next_key_expiry_timestamp_seconds",
    "When the first of the users' keys that are valid expires, in seconds since the epoch; +Inf if "
    "none does.",
)

# By run, of the runs that were reported last: what clients say of the last step.

RUN_REWARD = Gauge("tinsmith_run_reward", "Mean reward of a step.", RUN_LABELS)
RUN_REWARD_SPREAD = Gauge(
    "tinsmith_run_reward_spread", "Mean deviation of the rewards within a group.", RUN_LABELS
)
RUN_RESPONSE_TOKENS = Gauge(
    "tinsmith_run_response_tokens", "Mean length of the responses of a step.", RUN_LABELS
)
RUN_TRUNCATED = Gauge(
    "tinsmith_run_truncated_fraction",
    "Share of the responses of a step that were cut at their limit.",
    RUN_LABELS,
)
RUN_DEAD_GROUPS = Gauge(
    "tinsmith_run_dead_group_fraction",
    "Share of the groups of a step whose rewards are all equal.",
    RUN_LABELS,
)
