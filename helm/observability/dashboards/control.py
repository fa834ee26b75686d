"""Jobs, nodes, and the controller itself."""

from __future__ import annotations

from helm.observability.expressions import rate
from helm.observability.panels import Dashboard, Row
from helm.observability.plots import CONTROLLER, by_label, one, spread

CONTROL = Dashboard(
    "tinsmith-controller",
    "Tinsmith: controller",
    "Jobs, nodes and GPUs, and the controller's own health.",
    (),
    [
        Row(
            "Jobs and nodes",
            [
                by_label("Jobs by phase", f"max by (phase) ({CONTROLLER}_jobs)", "phase"),
                by_label(
                    "Jobs that wait for nodes",
                    f"max by (queue) ({CONTROLLER}_waiting_jobs)",
                    "queue",
                ),
                by_label("GPUs", f"max by (state) ({CONTROLLER}_gpus)", "state"),
                by_label("Nodes", f"max by (state) ({CONTROLLER}_nodes)", "state"),
                by_label(
                    "Decisions each second",
                    rate(f"{CONTROLLER}_decisions_total", by="decision"),
                    "decision",
                ),
                spread("Time of a decision", f"{CONTROLLER}_assignment_duration_seconds"),
            ],
        ),
        Row(
            "Controller",
            [
                one("Replicas that lead", f"sum({CONTROLLER}_is_leader)", "leaders"),
                one("Workloads to look at", f"max({CONTROLLER}_queue_length)", "workloads"),
                by_label(
                    "Looks each second",
                    rate(f"{CONTROLLER}_reconciles_total", by="kind, outcome"),
                    "kind}} {{outcome",
                ),
                spread("Time of a look", f"{CONTROLLER}_reconcile_duration_seconds"),
                by_label(
                    "Requests to the API server",
                    rate(f"{CONTROLLER}_api_requests_total", by="method, status"),
                    "method}} {{status",
                ),
                by_label(
                    "Watches begun anew",
                    rate(f"{CONTROLLER}_watch_restarts_total", by="resource, reason"),
                    "resource}} {{reason",
                ),
            ],
        ),
    ],
)
