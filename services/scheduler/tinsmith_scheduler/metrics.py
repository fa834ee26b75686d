"""Metrics of the scheduler pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

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
