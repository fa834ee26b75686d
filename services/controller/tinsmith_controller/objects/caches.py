"""Caches of all objects of the cluster that the controller reads, kept by informers."""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from tinsmith_controller.kube.api_client import (
    JOBS,
    NODES,
    PODS,
    POOLS,
    PRIORITY_CLASSES,
    Json,
    Resource,
)
from tinsmith_controller.kube.informer import Informer, Watchable
from tinsmith_controller.objects.config_maps import ConfigMaps, Readable
from tinsmith_controller.objects.conversion import (
    AuthorCheck,
    NodeRecord,
    PodRecord,
    PriorityRecord,
    WorkloadRecord,
    allow_all,
    node_record,
    pod_record,
    priority_record,
    workload_record,
)
from tinsmith_controller.objects.kueue_caches import KueueCaches
from tinsmith_jobs.checkpoint_references import jobs_of
from tinsmith_jobs.conditions import ENDED
from tinsmith_jobs.naming import JOB_KIND, POOL_KIND, NamespacedName
from tinsmith_jobs.plan.observed import ObservedJob, ObservedPool, PodView
from tinsmith_jobs.spec import JobSpec

_EVERYWHERE = ("",)

OnWorkload = Callable[[NamespacedName], None]


class Server(Watchable, Readable, Protocol):
    """What is asked of the API server."""


class Caches:
    """The informers, and what is looked up in them.

    Args:
        cluster: The API server.
        namespaces: Namespaces of jobs and pools; nodes and pods are looked at everywhere, since
            what others use is not free.
        on_workload: Called with each workload that something happened to.
        on_capacity: Called when something happened that the assignment depends on.
        on_gone: Called with the uid of a workload that is gone.
        check: Says why the operators do not let a job run.
        has_kueue: Whether to look at Kueue's objects too; without it none of them is read.
    """

    def __init__(
        self,
        cluster: Server,
        namespaces: tuple[str, ...],
        *,
        on_workload: OnWorkload,
        on_capacity: Callable[[], None],
        on_gone: Callable[[str], None],
        check: AuthorCheck = allow_all,
        has_kueue: bool = False,
    ) -> None:
        self._on_workload = on_workload
        self._on_capacity = on_capacity
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self.config_maps = ConfigMaps(cluster)
        """The ConfigMaps that jobs name; they are not watched."""
        self._pods_by_owner: dict[str, dict[str, PodRecord]] = {}
        workload = functools.partial(workload_record, check=check)
        self._jobs = Informer(cluster, JOBS, namespaces, workload, self._workload_changed)
        self._pools = Informer(cluster, POOLS, namespaces, workload, self._workload_changed)
        self._pods = Informer(cluster, PODS, _EVERYWHERE, pod_record, self._pod_changed)
        self._nodes = Informer(cluster, NODES, _EVERYWHERE, node_record, self._node_changed)
        self._priorities = Informer(
            cluster, PRIORITY_CLASSES, _EVERYWHERE, priority_record, self._priority_changed
        )
        self.kueue = (
            KueueCaches(
                cluster,
                namespaces,
                on_job=self._queued_job_changed,
                on_classes=self._wake_queued_jobs,
            )
            if has_kueue
            else None
        )
        """Kueue's objects; None if the operators do not use it."""

    def start(self) -> None:
        """Begin to list and watch."""
        for informer in self._all_informers():
            informer.start()

    def stop(self) -> None:
        """Begin no further watch."""
        for informer in self._all_informers():
            informer.stop()

    def wait_synced(self, timeout_s: float) -> bool:
        """Return whether everything was listed once, within a time for each kind.

        Kueue's objects are not waited for: only jobs of its queues need them.
        """
        return all(informer.wait_synced(timeout_s) for informer in self.informers.values())

    def note(self, resource: Resource, content: Json) -> None:
        """Take what a request returned."""
        self.informers[resource].put(content)

    def refresh_config_maps(self, item: ObservedJob | ObservedPool, now: datetime.datetime) -> None:
        """Read the ConfigMaps that a workload names; see `ConfigMaps.refresh`."""
        if self.config_maps.refresh(item, now):
            self._on_capacity()

    def workload(self, key: NamespacedName) -> WorkloadRecord | None:
        """Return a job or pool."""
        record = self._informer_of(key).get((key.namespace, key.name))
        return record if record is None else self.admitted(record)

    def is_of_first_list(self, record: WorkloadRecord) -> bool:
        """Return whether a job or pool is as this process found it when it began."""
        return self._informer_of(record.item.key).is_of_first_list(record.content)

    def jobs(self) -> Iterable[WorkloadRecord]:
        """Return all jobs."""
        return map(self.admitted, self._jobs.snapshot().values())

    def workloads(self) -> list[WorkloadRecord]:
        """Return all jobs and pools; a job that Kueue admitted has the node rules of that."""
        return [*self.jobs(), *self._pools.snapshot().values()]

    def as_written(self, key: NamespacedName) -> WorkloadRecord | None:
        """Return a job or pool with what it asks for itself, without what Kueue admitted."""
        return self._informer_of(key).get((key.namespace, key.name))

    def admitted(self, record: WorkloadRecord) -> WorkloadRecord:
        """Return a job with the node rules that Kueue admitted it with, or a record as it is."""
        return record if self.kueue is None else self.kueue.admitted(record)

    def pool(self, namespace: str, name: str) -> ObservedPool | None:
        """Return a pool."""
        record = self._pools.get((namespace, name))
        return record.item if record is not None and isinstance(record.item, ObservedPool) else None

    def job(self, namespace: str, name: str) -> ObservedJob | None:
        """Return a job."""
        record = self._jobs.get((namespace, name))
        return record.item if record is not None and isinstance(record.item, ObservedJob) else None

    def pods(self) -> Iterable[PodRecord]:
        """Return all pods of the cluster."""
        return self._pods.snapshot().values()

    def pods_of(self, uid: str) -> list[PodView]:
        """Return the pods of a workload."""
        with self._lock:
            return [record.view for record in self._pods_by_owner.get(uid, {}).values()]

    def node(self, name: str) -> NodeRecord | None:
        """Return a node."""
        return self._nodes.get(("", name))

    def nodes(self) -> Iterable[NodeRecord]:
        """Return all nodes."""
        return self._nodes.snapshot().values()

    def priorities(self) -> Mapping[str, PriorityRecord]:
        """Return PriorityClasses by name."""
        return {record.name: record for record in self._priorities.snapshot().values()}

    @property
    def informers(self) -> Mapping[Resource, Informer[Any]]:
        """The informers by what they look at, in the order in which they begin."""
        return {
            NODES: self._nodes,
            PRIORITY_CLASSES: self._priorities,
            PODS: self._pods,
            POOLS: self._pools,
            JOBS: self._jobs,
        }

    def _all_informers(self) -> list[Informer[Any]]:
        further = {} if self.kueue is None else self.kueue.informers
        return [*self.informers.values(), *further.values()]

    def _queued_job_changed(self, job: NamespacedName) -> None:
        self._on_workload(job)
        self._on_capacity()

    def _wake_queued_jobs(self) -> None:
        """Have the jobs looked at that a queue of Kueue has."""
        for record in self._jobs.snapshot().values():
            if record.queue:
                self._on_workload(record.item.key)
        self._on_capacity()

    def _informer_of(self, key: NamespacedName) -> Informer[WorkloadRecord]:
        return self._jobs if key.kind == JOB_KIND else self._pools

    def _workload_changed(
        self, before: WorkloadRecord | None, after: WorkloadRecord | None
    ) -> None:
        record = after or before
        assert record is not None
        if before is not None and (after is None or after.item.uid != before.item.uid):
            self.config_maps.forget(before.item.uid)
            self._on_gone(before.item.uid)
        self._on_workload(record.item.key)
        if record.item.key.kind == POOL_KIND:
            self._wake_jobs_of(record.item.key)
        elif self._jobs.wait_synced(0) and _final_of(before) != _final_of(after):
            self._wake_jobs_after(record.item.key)
        self._on_capacity()

    def _wake_jobs_of(self, pool: NamespacedName) -> None:
        """Have the jobs looked at that may wait for a pool."""
        for job in self.jobs():
            item = job.item
            is_waiting = isinstance(item, ObservedJob) and item.status.assigned_time is None
            if is_waiting and item.key.namespace == pool.namespace and _pool_of(item) == pool.name:
                self._on_workload(item.key)

    def _wake_jobs_after(self, ended: NamespacedName) -> None:
        """Have the jobs looked at that may wait for the final checkpoint of another."""
        for job in self._jobs.snapshot().values():
            spec, key = job.item.spec, job.item.key
            named = jobs_of(spec) if isinstance(spec, JobSpec) else ()
            if ended.name in named and key.namespace == ended.namespace:
                self._on_workload(key)

    def _pod_changed(self, before: PodRecord | None, after: PodRecord | None) -> None:
        with self._lock:
            if before is not None and before.owner_uid:
                owned = self._pods_by_owner.get(before.owner_uid, {})
                if after is None or after.owner_uid != before.owner_uid:
                    owned.pop(before.view.name, None)
                if not owned:
                    self._pods_by_owner.pop(before.owner_uid, None)
            if after is not None and after.owner_uid:
                self._pods_by_owner.setdefault(after.owner_uid, {})[after.view.name] = after
        for record in (before, after):
            if record is not None and record.owner is not None:
                self._on_workload(record.owner)
        if _usage(before) != _usage(after):
            self._on_capacity()

    def _node_changed(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        # The kubelet's heartbeats change a node all the time, and nothing of what we keep.
        if before == after:
            return
        name = (after or before).name  # type: ignore[union-attr]
        for record in self.workloads():
            if any(entry.node == name for entry in record.item.status.assignments):
                self._on_workload(record.item.key)
        with self._lock:
            owners = {
                pod.owner
                for pods in self._pods_by_owner.values()
                for pod in pods.values()
                if pod.node == name and pod.owner is not None
            }
        for owner in owners:
            self._on_workload(owner)
        self._on_capacity()

    def _priority_changed(
        self, before: PriorityRecord | None, after: PriorityRecord | None
    ) -> None:
        if before == after:
            return
        for record in self.workloads():
            self._on_workload(record.item.key)
        self._on_capacity()


def _pool_of(item: ObservedJob | ObservedPool) -> str:
    return item.spec.pool if isinstance(item.spec, JobSpec) else ""


def _final_of(record: WorkloadRecord | None) -> object:
    """Return what jobs that name this one wait for: whether it is there, has ended, and left."""
    status = None if record is None else record.item.status
    return None if status is None else (status.phase in ENDED, status.final)


def _usage(record: PodRecord | None) -> object:
    if record is None or not record.node or record.has_ended:
        return None
    return record.node, record.resources, record.owner_uid
