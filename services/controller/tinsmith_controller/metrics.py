"""Metrics of the controller pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

IS_LEADER = Gauge("tinsmith_controller_is_leader", "1 in the replica that decides, 0 in others.")
API_REQUESTS = Counter(
    "tinsmith_controller_api_requests_total",
    "Requests to the Kubernetes API, by method and HTTP status.",
    ["method", "status"],
)
RECONCILES = Counter(
    "tinsmith_controller_reconciles_total",
    "Looks at a workload: done, conflict, failed.",
    ["kind", "outcome"],
)
RECONCILE_SECONDS = Histogram(
    "tinsmith_controller_reconcile_duration_seconds",
    "Time of one look at a workload, with its requests.",
    ["kind"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
ASSIGNMENT_SECONDS = Histogram(
    "tinsmith_controller_assignment_duration_seconds",
    "Time of one decision over all workloads and nodes, without requests.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
QUEUE_LENGTH = Gauge("tinsmith_controller_queue_length", "Workloads that are to be looked at.")
JOBS = Gauge("tinsmith_controller_jobs", "Jobs by phase.", ["phase"])
WAITING_JOBS = Gauge(
    "tinsmith_controller_waiting_jobs", "Jobs that wait for nodes, by queue.", ["queue"]
)
GPUS = Gauge(
    "tinsmith_controller_gpus",
    "GPUs of ready nodes: allocatable, assigned to workloads, used by others.",
    ["state"],
)
NODES = Gauge("tinsmith_controller_nodes", "Nodes: ready, cordoned, lost.", ["state"])
DECISIONS = Counter(
    "tinsmith_controller_decisions_total",
    "What the assignment decided: assigned, preempted, given_back.",
    ["decision"],
)
WATCH_RESTARTS = Counter(
    "tinsmith_controller_watch_restarts_total",
    "Watches that were begun anew: ended, failed, too_old.",
    ["resource", "reason"],
)
