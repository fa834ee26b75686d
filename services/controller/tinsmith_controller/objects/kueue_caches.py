"""Copies of Kueue's objects, and what they mean for the jobs that have the label of a queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tinsmith_controller.kube.api_client import (
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    Json,
    Resource,
)
from tinsmith_controller.kube.informer import Informer, Watchable
from tinsmith_controller.kueue.flavors import AdmittedNodes, admitted_nodes, with_admitted_nodes
from tinsmith_controller.kueue.waiting import NOT_READ, NOT_SERVED, waiting_sentence
from tinsmith_controller.kueue.workload_record import (
    FlavorRecord,
    KueueWorkload,
    WorkloadPriorityRecord,
    flavor_record,
    kueue_workload,
    workload_priority_record,
)
from tinsmith_controller.objects.conversion import WorkloadRecord
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.plan.observed import ObservedJob
from tinsmith_jobs.spec import JobSpec

logger = logging.getLogger(__name__)

_EVERYWHERE = ("",)


class KueueCaches:
    """The informers of Workloads, ResourceFlavors and WorkloadPriorityClasses.

    A cluster may not have them, and other jobs do not wait for them.

    Args:
        cluster: The API server.
        namespaces: Namespaces of jobs.
        on_job: Called with each job whose Workload changed.
        on_classes: Called when a flavor or a priority changed.
    """

    def __init__(
        self,
        cluster: Watchable,
        namespaces: tuple[str, ...],
        *,
        on_job: Callable[[NamespacedName], None],
        on_classes: Callable[[], None],
    ) -> None:
        self._on_job = on_job
        self._on_classes = on_classes
        self._lock = threading.Lock()
        self._by_job: dict[str, KueueWorkload] = {}
        self._is_absent = False
        absent = self.note_absence
        self._workloads = Informer(
            cluster, WORKLOADS, namespaces, kueue_workload, self._workload_changed, on_absent=absent
        )
        self._flavors = Informer(
            cluster,
            RESOURCE_FLAVORS,
            _EVERYWHERE,
            flavor_record,
            self._class_changed,
            on_absent=absent,
        )
        self._priorities = Informer(
            cluster,
            WORKLOAD_PRIORITY_CLASSES,
            _EVERYWHERE,
            workload_priority_record,
            self._class_changed,
            on_absent=absent,
        )

    @property
    def informers(self) -> Mapping[Resource, Informer[Any]]:
        """The informers by what they look at."""
        return {
            RESOURCE_FLAVORS: self._flavors,
            WORKLOAD_PRIORITY_CLASSES: self._priorities,
            WORKLOADS: self._workloads,
        }

    @property
    def is_synced(self) -> bool:
        """Whether everything was listed once."""
        return all(informer.wait_synced(0) for informer in self.informers.values())

    def note_absence(self) -> None:
        """Take note that the API server does not know Kueue's resources; log it once."""
        with self._lock:
            is_new, self._is_absent = not self._is_absent, True
        if is_new:
            logger.error(
                "the setting kueue is on and the cluster has no resources of Kueue: install Kueue "
                "0.15 or later, or set controller.settings.kueue to false; jobs with the label of "
                "a queue wait"
            )

    def note(self, content: Json) -> None:
        """Take what a request returned of a Workload."""
        self._workloads.put(content)

    def workload_of(self, job_uid: str) -> KueueWorkload | None:
        """Return the Workload of a job."""
        with self._lock:
            return self._by_job.get(job_uid)

    def priorities(self) -> Mapping[str, WorkloadPriorityRecord]:
        """Return WorkloadPriorityClasses by name."""
        return {record.name: record for record in self._priorities.snapshot().values()}

    def admitted(self, record: WorkloadRecord) -> WorkloadRecord:
        """Return a job with the node rules of its admission, or with what it waits for.

        Both are of one moment: a job without rules never looks as if it might get nodes.
        """
        job = record.item
        if not record.queue or not isinstance(job, ObservedJob) or job.spec is None:
            return record
        waiting = self.waiting_of(record)
        found = AdmittedNodes() if waiting else self._nodes_of(job.uid, job.spec)
        spec = with_admitted_nodes(job.spec, found.rules)
        return replace(
            record, item=replace(job, spec=spec), queue_obstacle=waiting or found.problem
        )

    def waiting_of(self, record: WorkloadRecord) -> str:
        """Return what keeps a job in its queue, in one sentence; empty if it is admitted."""
        if not record.queue:
            return ""
        if not self.is_synced:
            return NOT_SERVED if self._is_absent else NOT_READ
        workload = self.workload_of(record.item.uid)
        if workload is None or not workload.is_admitted or workload.is_deleting:
            return waiting_sentence(record.queue, workload)
        return ""

    def _nodes_of(self, job_uid: str, spec: JobSpec) -> AdmittedNodes:
        workload = self.workload_of(job_uid)
        if workload is None or not workload.is_admitted:
            return AdmittedNodes()
        flavors: dict[str, FlavorRecord] = {
            flavor.name: flavor for flavor in self._flavors.snapshot().values()
        }
        return admitted_nodes(workload, spec, flavors)

    def _workload_changed(self, before: KueueWorkload | None, after: KueueWorkload | None) -> None:
        with self._lock:
            self._is_absent = False
            if before is not None and before.job_uid:
                self._by_job.pop(before.job_uid, None)
            if after is not None and after.job_uid:
                self._by_job[after.job_uid] = after
        for job in dict.fromkeys(each.job for each in (before, after) if each is not None):
            if job is not None:
                self._on_job(job)

    def _class_changed(self, before: object, after: object) -> None:
        if before != after:
            self._on_classes()
