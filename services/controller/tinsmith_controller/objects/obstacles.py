"""What keeps a workload from being started, besides nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tinsmith_controller.assignment.node_filters import unmet_rules
from tinsmith_controller.assignment.types import QueueConfig
from tinsmith_controller.objects.caches import Caches
from tinsmith_controller.objects.conversion import WorkloadRecord
from tinsmith_jobs.model_memory import least_gpu_bytes
from tinsmith_jobs.plan.named_checkpoints import missing_checkpoints
from tinsmith_jobs.plan.observed import ObservedJob, ObservedPool
from tinsmith_jobs.spec import JobSpec


def is_serving(pool: ObservedPool) -> bool:
    """Return whether any replica of a pool is ready."""
    return any(role.ready for role in pool.status.role_statuses)


def obstacle_of(
    record: WorkloadRecord, stores: Caches, queues: Callable[[], QueueConfig] = QueueConfig
) -> str:
    """Return one sentence about what is not there; empty if nothing is in the way.

    The copies of the cluster's objects alone decide, so a restarted process decides the same. With
    what is in the way, the sentence names what else will be: a queue, a label or a GPU product that
    there is not. Their author then mends all of it at once.
    """
    if record.queue_obstacle:
        # Nodes and the rest are of no interest before it is admitted.
        return record.queue_obstacle
    item = record.item
    found = list(_missing(record, stores))
    if not found or item.spec is None:
        return ""
    scheduling = item.spec.scheduling
    if isinstance(item, ObservedJob) and not record.has_own_queue:
        names = sorted(queues().queues)
        if names and scheduling.queue not in names:
            found.append(f"queue {scheduling.queue} does not exist; there are {', '.join(names)}")
    if any(role.is_placed and role.replicas for role in item.spec.roles):
        nodes = list(stores.nodes())
        for role in item.spec.roles:
            if role.replicas:
                rules = scheduling.rules_for(role)
                rules = replace(rules, least_gpu_bytes=least_gpu_bytes(item.spec, role))
                found += unmet_rules(nodes, rules, has_gpus=bool(role.gpus))
    return "; ".join(dict.fromkeys(found))


def _missing(record: WorkloadRecord, stores: Caches) -> Iterator[str]:
    item = record.item
    if item.spec is None:
        return
    name = item.spec.scheduling.priority_class
    if name and name not in stores.priorities():
        yield f"waits for the PriorityClass {name}, which does not exist"
    is_new = item.status.assigned_time is None
    if isinstance(item.spec, JobSpec) and item.spec.pool:
        pool = stores.pool(item.key.namespace, item.spec.pool)
        if pool is None:
            yield (
                f"waits for the TrainerPool {item.spec.pool}, which does not exist in "
                f"namespace {item.key.namespace}"
            )
        elif pool.spec is None:
            yield f"waits for the TrainerPool {item.spec.pool}, which cannot be run"
        # A job that began waits in its own way while replicas of its pool are replaced.
        elif is_new and not is_serving(pool):
            yield f"waits for the TrainerPool {item.spec.pool}, which has no replica that is ready"
    if is_new:
        yield from (f"waits for {what}" for what in stores.config_maps.problems(item))
    if isinstance(item, ObservedJob):
        missing = missing_checkpoints(item, lambda name: stores.job(item.key.namespace, name))
        yield from (f"waits for {what}" for what in missing)
