"""What the dashboards show; no JSON, and nothing of Grafana but units and legends."""

from __future__ import annotations

from collections.abc import Sequence

from helm.observability.dashboards.cluster import CLUSTER, PROJECT_USE
from helm.observability.dashboards.control import CONTROL
from helm.observability.dashboards.queues import QUEUES
from helm.observability.dashboards.runs import RL_HEALTH, RUN_PACE
from helm.observability.dashboards.serving import SAMPLERS, STORAGE
from helm.observability.panels import Dashboard

DASHBOARDS: Sequence[Dashboard] = (
    CLUSTER,
    PROJECT_USE,
    RUN_PACE,
    RL_HEALTH,
    QUEUES,
    SAMPLERS,
    STORAGE,
    CONTROL,
)
