"""What keeps a workload from being started, besides nodes."""

from __future__ import annotations

from tinsmith_controller.objects.caches import Caches
from tinsmith_jobs.plan.observed import Job, Pool
from tinsmith_jobs.spec import JobSpec


def is_serving(pool: Pool) -> bool:
    """Return whether any replica of a pool is ready."""
    return any(role.ready for role in pool.status.role_statuses)


def obstacle_of(item: Job | Pool, stores: Caches) -> str:
    """Return one sentence about what is not there; empty if nothing is in the way.

    The copies of the cluster's objects alone decide, so a restarted process decides the same.
    """
    if item.spec is None:
        return ""
    name = item.spec.scheduling.priority_class
    if name and name not in stores.priorities():
        return f"waits for the PriorityClass {name}, which does not exist"
    if isinstance(item.spec, JobSpec) and item.spec.pool:
        pool = stores.pool(item.key.namespace, item.spec.pool)
        if pool is None:
            return (
                f"waits for the TrainerPool {item.spec.pool}, which does not exist in "
                f"namespace {item.key.namespace}"
            )
        if pool.spec is None:
            return f"waits for the TrainerPool {item.spec.pool}, which cannot be run"
        # A job that began waits in its own way while replicas of its pool are replaced.
        if item.status.assigned_time is None and not is_serving(pool):
            return f"waits for the TrainerPool {item.spec.pool}, which has no replica that is ready"
    return ""
