"""Has jobs wait in the queues of Kueue: one Workload for each, which says when its job may run.

Each look makes one write at most, under the version or uid that was decided from. So a process may
be killed between any two, and a write that arrives late changes nothing that was decided since.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith_controller.kube.api_client import JOBS, WORKLOADS, ApiError, Cluster
from tinsmith_controller.kube.leader_election import LeaderElection
from tinsmith_controller.kueue.decision import Action, QueuedJob, WorkloadView, decide
from tinsmith_controller.kueue.names import pod_set_names
from tinsmith_controller.kueue.waiting import NOT_SERVED
from tinsmith_controller.kueue.workload_form import (
    QueuePriority,
    make_workload,
    updated_workload,
)
from tinsmith_controller.kueue.workload_record import KueueWorkload, usage_of
from tinsmith_controller.kueue.workload_status import finished, released, reported
from tinsmith_controller.objects.caches import Caches
from tinsmith_controller.objects.conversion import WorkloadRecord
from tinsmith_controller.objects.events import EventRecorder
from tinsmith_controller.objects.kueue_caches import KueueCaches
from tinsmith_controller.owned_objects import RetryLaterError, is_owned_by
from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.pod_manifests import resources_of
from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import ENDED, Phase
from tinsmith_jobs.naming import TEMPLATE_ANNOTATION
from tinsmith_jobs.plan.actions import Event
from tinsmith_jobs.plan.observed import ObservedJob, ObservedPool, PodPhase, PodView
from tinsmith_jobs.quantities import GPU_RESOURCE
from tinsmith_jobs.spec import WORKER, JobSpec

logger = logging.getLogger(__name__)

_TELL_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Followed:
    """What came of one look at a job and its Workload.

    Attributes:
        is_changed: Whether the job was suspended or resumed; its new version is looked at next.
        again_s: When to look again though nothing happens; None if there is no need.
    """

    is_changed: bool = False
    again_s: float | None = None


class KueueQueueing:
    """Makes Workloads of jobs, and suspends and resumes jobs as Kueue says."""

    def __init__(
        self,
        cluster: Cluster,
        stores: Caches,
        election: LeaderElection,
        events: EventRecorder,
        deployment: Deployment,
    ) -> None:
        self._cluster = cluster
        self._stores = stores
        self._election = election
        self._events = events
        self._deployment = deployment

    def waiting_of(self, record: WorkloadRecord) -> str:
        """Return what a job waits for in its queue, in one sentence; empty if it is admitted."""
        kueue = self._stores.kueue
        if kueue is None or not isinstance(record.item, ObservedJob):
            return ""
        waiting = kueue.waiting_of(record)
        is_new = kueue.is_synced and kueue.workload_of(record.item.uid) is None
        missing = self._missing_class(record, kueue) if waiting and is_new else ""
        return missing or waiting

    def follow(
        self, record: WorkloadRecord, pods: Mapping[str, PodView], now: datetime.datetime
    ) -> Followed:
        """Do the next write that a job and its Workload need.

        Args:
            record: The job, as it is written.
            pods: Its pods by name.
            now: The time.

        Raises:
            ApiError: If a request failed; a conflict means that its object was changed meanwhile.
            RetryLaterError: If the cluster refuses a Workload; the text says why.
            NotLeaderError: If this replica may not act any more.
        """
        kueue, job = self._stores.kueue, record.item
        if (
            kueue is None
            or not kueue.is_synced
            or not isinstance(job, ObservedJob)
            or job.is_deleting
        ):
            return Followed()
        workload = kueue.workload_of(job.uid)
        if not record.queue and workload is None:
            return Followed()
        desired = self._desired(record, kueue, workload)
        if desired is None and record.queue and job.status.phase not in ENDED:
            return Followed()
        action = decide(_view_of(record, job, pods), _compared(workload, desired))
        return self._act(action, record, workload, desired, pods, now)

    def _act(
        self,
        action: Action,
        record: WorkloadRecord,
        workload: KueueWorkload | None,
        desired: dict[str, Any] | None,
        pods: Mapping[str, PodView],
        now: datetime.datetime,
    ) -> Followed:
        job = record.item
        if action in (Action.SUSPEND, Action.RESUME):
            self._set_suspend(record, action is Action.SUSPEND)
            if action is Action.RESUME:
                told = Event(conditions.RESUMED, f"Kueue admitted the job to {record.queue}")
                self._events.record(job.key, job.uid, told, now)
            return Followed(is_changed=True)
        if action is Action.CREATE and desired is not None:
            self._create(record, desired)
        if workload is None:
            return Followed()
        if action is Action.FINISH:
            return self._finish(record, workload, now)
        if action is Action.REPORT:
            return self._report(record, workload, pods, now)
        if action is Action.UPDATE and desired is not None:
            self._replace(updated_workload(workload.content, desired))
        elif action is Action.DELETE:
            self._election.require()
            self._cluster.delete(WORKLOADS, job.key.namespace, workload.name, uid=workload.uid)
        elif action is Action.RELEASE:
            self._replace_status(released(workload, now))
        return Followed()

    def _desired(
        self, record: WorkloadRecord, kueue: KueueCaches, workload: KueueWorkload | None
    ) -> dict[str, Any] | None:
        """Return the Workload that a job is to have; None if that is not known or not allowed."""
        job, spec = record.item, record.item.spec
        if not isinstance(job, ObservedJob) or not isinstance(spec, JobSpec) or record.refusal:
            return None
        if not record.queue:
            return None
        priority = self._priority(record, spec, kueue)
        resources = {
            role.name: resources_of(role, role.gpus, self._deployment) for role in spec.roles
        }
        if workload is not None and not spec.suspend:
            resources = _as_admitted(spec, resources, workload)
        return make_workload(job, spec, record.queue, priority, resources)

    def _missing_class(self, record: WorkloadRecord, kueue: KueueCaches) -> str:
        """Return which priority class of a job is not there, in one sentence."""
        spec, name = record.item.spec, record.queue_priority
        if name:
            if name in kueue.priorities():
                return ""
            return f"waits for the WorkloadPriorityClass {name}, which does not exist"
        name = spec.scheduling.priority_class if spec is not None else ""
        if not name or name in self._stores.priorities():
            return ""
        return f"waits for the PriorityClass {name}, which does not exist"

    def _priority(self, record: WorkloadRecord, spec: JobSpec, kueue: KueueCaches) -> QueuePriority:
        """Return the priority of a job in its queue: its label's, else that of its pods.

        Where its class is not there, that of the Workload stays.
        """
        name = record.queue_priority
        if name:
            found = kueue.priorities().get(name)
            if found is not None:
                return QueuePriority.of_workloads(name, found.value)
        else:
            classes = self._stores.priorities()
            default = next((entry.name for entry in classes.values() if entry.is_default), "")
            name = spec.scheduling.priority_class or default
            if name in classes:
                return QueuePriority.of_pods(name, classes[name].value)
        workload = kueue.workload_of(record.item.uid) if name else None
        return QueuePriority.read(workload.content) if workload else QueuePriority()

    def _set_suspend(self, record: WorkloadRecord, is_suspended: bool) -> None:
        key = record.item.key
        self._election.require()
        metadata = record.content["metadata"]
        version = {name: metadata[name] for name in ("uid", "resourceVersion")}
        body = {"metadata": version, "spec": {"suspend": is_suspended}}
        answer = self._cluster.patch(JOBS, key.namespace, key.name, body)
        self._stores.note(JOBS, answer)

    def _create(self, record: WorkloadRecord, desired: dict[str, Any]) -> None:
        kueue, job = self._stores.kueue, record.item
        assert kueue is not None
        if self._missing_class(record, kueue):
            return
        self._election.require()
        name, namespace = desired["metadata"]["name"], job.key.namespace
        try:
            found = self._cluster.create(WORKLOADS, namespace, desired)
        except ApiError as error:
            if error.is_not_found:
                raise RetryLaterError(NOT_SERVED) from error
            if not error.already_exists:
                raise _explained(error, name) from error
            found = self._cluster.get(WORKLOADS, namespace, name)
            if not is_owned_by(job, found):
                told = f"waits for the Workload {name} to be deleted, which another job has"
                raise RetryLaterError(told) from error
        self._note(found)

    def _finish(
        self, record: WorkloadRecord, workload: KueueWorkload, now: datetime.datetime
    ) -> Followed:
        status = record.item.status
        end = status.condition(conditions.COMPLETE) or status.condition(conditions.FAILED)
        body = finished(
            workload,
            has_succeeded=status.phase is Phase.SUCCEEDED,
            message=end.message if end is not None else "",
            now=now,
        )
        return self._tell(record.item, body)

    def _report(
        self,
        record: WorkloadRecord,
        workload: KueueWorkload,
        pods: Mapping[str, PodView],
        now: datetime.datetime,
    ) -> Followed:
        job, spec = record.item, record.item.spec
        names = pod_set_names(spec.roles) if spec is not None else {}
        # Of all roles, only players are done before their job is.
        kinds = {role.name: role.kind for role in spec.roles} if spec is not None else {}
        done: dict[str, int] = {}
        for pod in pods.values():
            if kinds.get(pod.role) == WORKER and pod.phase is PodPhase.SUCCEEDED:
                pod_set = names[pod.role]
                count, _ = workload.pod_sets.get(pod_set, (0, ()))
                done[pod_set] = min(count, done.get(pod_set, 0) + 1)
        is_ready = job.status.phase is Phase.RUNNING
        body = reported(workload, is_ready=is_ready, done=done, now=now)
        return Followed() if body is None else self._tell(job, body)

    def _replace(self, body: dict[str, Any]) -> None:
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        self._election.require()
        try:
            self._note(self._cluster.replace(WORKLOADS, namespace, body))
        except ApiError as error:
            raise _explained(error, name) from error

    def _tell(self, job: ObservedJob | ObservedPool, body: dict[str, Any]) -> Followed:
        """Write what Kueue is to know and the job does not depend on; a later look tries again.

        Kueue's webhooks may be down, and pods are replaced all the same.
        """
        try:
            self._replace_status(body)
        except (ApiError, RetryLaterError) as error:
            if isinstance(error, ApiError) and error.is_conflict:
                raise
            logger.warning(
                "Kueue not told", extra={"workload": str(job.key), "problem": str(error)}
            )
            return Followed(again_s=_TELL_AGAIN_S)
        return Followed()

    def _replace_status(self, body: dict[str, Any]) -> None:
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        self._election.require()
        try:
            self._note(self._cluster.replace(WORKLOADS, namespace, body, subresource="status"))
        except ApiError as error:
            raise _explained(error, name) from error

    def _note(self, answer: dict[str, Any]) -> None:
        if self._stores.kueue is not None:
            self._stores.kueue.note(answer)


def _explained(error: ApiError, name: str) -> Exception:
    """Return what to raise for a write of a Workload that failed."""
    if error.is_invalid or error.is_forbidden:
        return RetryLaterError(f"the cluster refuses the Workload {name}: {error.message}")
    return error


def _view_of(record: WorkloadRecord, job: ObservedJob, pods: Mapping[str, PodView]) -> QueuedJob:
    runs = any(not pod.has_ended and not pod.is_deleting for pod in pods.values())
    spec = job.spec
    return QueuedJob(
        has_queue=bool(record.queue),
        is_suspended=spec is not None and spec.suspend,
        is_cancelled=spec is not None and spec.cancel,
        has_ended=job.status.phase in ENDED,
        is_active=bool(job.status.assignments) or runs,
    )


def _compared(
    workload: KueueWorkload | None, desired: Mapping[str, Any] | None
) -> WorkloadView | None:
    if workload is None:
        return None
    counts_right = is_current = has_priority = True
    if desired is not None:
        spec, content = desired["spec"], workload.content.get("spec") or {}
        counts_right = (workload.queue, workload.pod_sets) == (spec["queueName"], usage_of(spec))
        is_current = counts_right and workload.form == _form_of(desired)
        fields = ("priority", "priorityClassRef")
        has_priority = all(content.get(name) == spec.get(name) for name in fields)
    return WorkloadView(
        is_deleting=workload.is_deleting,
        has_quota=workload.has_quota,
        is_admitted=workload.is_admitted,
        is_evicted=workload.is_evicted,
        is_finished=workload.is_finished,
        counts_right=counts_right,
        is_current=is_current,
        has_priority=has_priority,
    )


def _as_admitted(
    spec: JobSpec, resources: Mapping[str, dict[str, Any]], workload: KueueWorkload
) -> dict[str, dict[str, Any]]:
    """Return the resources of roles with the defaults that held when a job was admitted.

    Pods that run have those, whatever the defaults of this release are.
    """
    names, found = pod_set_names(spec.roles), dict(resources)
    for role in spec.roles:
        _, amounts = workload.pod_sets.get(names.get(role.name, ""), (0, ()))
        requests = dict(found[role.name]["requests"])
        for name, amount in amounts:
            if name in requests and name not in {*role.requests, *role.limits, GPU_RESOURCE}:
                requests[name] = format(amount, "f")
        found[role.name] = {**found[role.name], "requests": requests}
    return found


def _form_of(desired: Mapping[str, Any]) -> str:
    return str(desired["metadata"]["annotations"][TEMPLATE_ANNOTATION])
