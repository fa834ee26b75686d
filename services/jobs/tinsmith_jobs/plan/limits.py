"""Settings that plans depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Settings of the controller or launcher that plans depend on."""

    backoff_base_s: float = 10.0
    """Pause after the first failure; doubled by each further one."""
    backoff_max_s: float = 300.0
    refusal_s: float = 300.0
    """How long a node that refused a pod of a workload gets no pods of it."""
    unschedulable_s: float = 60.0
    """How long a pod may find no room on its node before another node is looked for."""
    image_pull_s: float = 600.0
    """How long pods may lack an image that cannot be pulled; then their job fails."""
    termination_s: float = 300.0
    """How long a pod may take to be gone once its grace is over; then its job no longer waits."""
    endpoint: str = ""
    """Address of the gateway, which jobs that serve are reached at."""
