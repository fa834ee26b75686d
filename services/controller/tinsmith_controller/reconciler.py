"""Reconciles one workload: observes it, asks the pure plan, and carries the plan out.

The order of the effects makes it safe to be killed between any two of them. Names of pods are
stored before pods are made, and keys are good before drivers that have them are made. The status is
written once, at the end, with the version that it was planned from as precondition.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tinsmith_controller.assignment.queue_config import QueueConfigFile
from tinsmith_controller.job_keys import JobKeys
from tinsmith_controller.kube.api_client import (
    JOBS,
    PODS,
    POOLS,
    Cluster,
)
from tinsmith_controller.kube.leader_election import LeaderElection
from tinsmith_controller.kueue_queueing import KueueQueueing
from tinsmith_controller.objects.caches import Caches
from tinsmith_controller.objects.config_maps import LOOK_AGAIN_S, needs_config_maps, with_problems
from tinsmith_controller.objects.conversion import NodeRecord, WorkloadRecord
from tinsmith_controller.objects.events import EventRecorder
from tinsmith_controller.objects.obstacles import obstacle_of
from tinsmith_controller.owned_objects import Memory, OwnedObjects, RetryLaterError
from tinsmith_controller.plan.pool_plan import plan_pool
from tinsmith_controller.pod_creation import PodCreation
from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.pod_manifests import template_of
from tinsmith_controller.pods.workload_context import WorkloadContext
from tinsmith_controller.rpc.scheduler_client import JobIdentity, SchedulerClient, SchedulerError
from tinsmith_controller.status_writer import StatusWriter
from tinsmith_jobs.checkpoint_references import with_checkpoints
from tinsmith_jobs.conditions import ENDED
from tinsmith_jobs.naming import (
    JOB_KIND,
    NamespacedName,
    job_resource,
)
from tinsmith_jobs.plan.actions import Plan
from tinsmith_jobs.plan.job_plan import plan_job
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.named_checkpoints import note_found
from tinsmith_jobs.plan.observed import Observed, ObservedJob, ObservedPool, PodView, Report
from tinsmith_jobs.plan.retry_policy import is_retried
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec import DRIVER, JobSpec, requested
from tinsmith_jobs.status import Status, with_uids

logger = logging.getLogger(__name__)


class Reconciler:
    """Looks at workloads.

    Args:
        cluster: The API server.
        stores: Copies of its objects.
        writer: Writes statuses.
        election: Says whether this replica may act.
        scheduler: The scheduler.
        events: Writes events.
        policy: The operators' queues.
        deployment: What pods are told.
        limits: Settings of plans.
        namespaces: Those that it looks at.
        node_lost_s: How long a node is not ready before its pods are given up.
        projects: Project by namespace; others have their own name.
        now: The time of day.
    """

    def __init__(
        self,
        cluster: Cluster,
        stores: Caches,
        writer: StatusWriter,
        election: LeaderElection,
        scheduler: SchedulerClient,
        events: EventRecorder,
        policy: QueueConfigFile,
        *,
        deployment: Deployment,
        limits: Limits,
        namespaces: Sequence[str],
        node_lost_s: float,
        projects: Mapping[str, str],
        now: Callable[[], datetime.datetime],
    ) -> None:
        objects = OwnedObjects(cluster, election)
        self._keys = JobKeys(cluster, election, scheduler)
        self._pods = PodCreation(cluster, stores, election, objects, deployment)
        self._queueing = KueueQueueing(cluster, stores, election, events, deployment)
        self._cluster = cluster
        self._stores = stores
        self._writer = writer
        self._election = election
        self._scheduler = scheduler
        self._events = events
        self._policy = policy
        self._deployment = deployment
        self._limits = limits
        self._projects = projects
        self._node_lost_s = node_lost_s
        self._own_projects = frozenset(projects.get(name, name) for name in namespaces)
        self._now = now
        self._lock = threading.Lock()
        self._memories: dict[str, Memory] = {}
        self._reports: dict[str, Report] = {}

    def look(self, key: NamespacedName) -> float | None:
        """Look at a workload; return when to look again though nothing happens.

        Raises:
            ApiError: If a request failed; a conflict means that it was changed meanwhile.
            RetryLaterError: If something that it depends on is not there now.
            NotLeaderError: If this replica may not act any more.
        """
        self._writer.settle(key)
        written = self._stores.as_written(key)
        if written is None or written.is_left_alone:
            return None
        record = self._with_named_checkpoints(self._stores.admitted(written))
        item = record.item
        memory = self._memory(item.uid)
        if isinstance(item, ObservedJob) and is_retried(item):
            memory.rejection = ""
        self._pods.settle(item, memory)
        now = self._now()
        pods = {view.name: view for view in self._stores.pods_of(item.uid)}
        if needs_config_maps(item, pods):
            self._stores.refresh_config_maps(item, now)
        try:
            followed = self._queueing.follow(written, pods, now)
            if followed.is_changed:
                return None
            observed = self._observe(record, pods, memory)
        except RetryLaterError as error:
            self._writer.write(record, replace(item.status, waiting_for=str(error)))
            raise
        plan = (
            plan_job(item, observed, now, self._limits)
            if isinstance(item, ObservedJob)
            else plan_pool(item, observed, now, self._limits)
        )
        self._apply(record, plan, memory, now)
        if item.status.assigned_time is None and self._stores.config_maps.problems(item):
            return min(LOOK_AGAIN_S, plan.requeue_s or LOOK_AGAIN_S)
        if followed.again_s is not None:
            return min(followed.again_s, plan.requeue_s or followed.again_s)
        return plan.requeue_s

    def revoke_orphans(self) -> None:
        """Have the scheduler forget jobs that were deleted without an end.

        Raises:
            SchedulerError: If that is not known to have happened.
        """
        holders = self._scheduler.key_holders()
        # In this order: a job with a key was in the cache before, and is gone if it is not now.
        live = {record.item.uid for record in self._stores.jobs()}
        for key, job in holders.items():
            if job.uid in live or job.name.split("/")[1] not in self._own_projects:
                continue
            self._election.require()
            self._scheduler.revoke(key)
            self._scheduler.forget(job)

    def identities(self) -> dict[str, tuple[NamespacedName, JobIdentity]]:
        """Return the jobs whose drivers may have something to report, by uid."""
        found = {}
        for record in self._stores.jobs():
            item = record.item
            if (
                isinstance(item, ObservedJob)
                and item.status.assignments
                and not record.is_left_alone
            ):
                found[item.uid] = (item.key, self._identity(item))
        return found

    def take_reports(self, reports: Mapping[str, Report]) -> set[str]:
        """Keep drivers' reports; return the uids of the jobs that have news."""
        with self._lock:
            news = {uid for uid, report in reports.items() if self._reports.get(uid) != report}
            self._reports |= reports
        return news

    def forget(self, uid: str) -> None:
        """Forget a workload that is gone."""
        with self._lock:
            self._memories.pop(uid, None)
            self._reports.pop(uid, None)

    def _memory(self, uid: str) -> Memory:
        with self._lock:
            return self._memories.setdefault(uid, Memory())

    def _identity(self, item: ObservedJob) -> JobIdentity:
        return JobIdentity(job_resource(self._project(item.key), item.key.name), item.uid)

    def _project(self, key: NamespacedName) -> str:
        return self._projects.get(key.namespace, key.namespace)

    def _templates(self, item: ObservedJob | ObservedPool) -> dict[str, str]:
        """Return what pods of a pool would be made from; those of jobs stay as they began."""
        if isinstance(item, ObservedJob) or item.spec is None:
            return {}
        owner = self._owner(item, item.status)
        gpus = {role.name: role.gpus for role in item.spec.roles}
        return {
            entry.pod: template_of(owner, replace(entry, gpus=gpus[entry.role]), self._deployment)
            for entry in item.status.assignments
            if entry.role in gpus
        }

    def _requests(self, item: ObservedJob | ObservedPool) -> dict[str, Resources]:
        if item.spec is None:
            return {}
        requests = self._deployment.requests
        return {role.name: requested(role, requests) for role in item.spec.roles if role.is_placed}

    def _observe(
        self, record: WorkloadRecord, pods: Mapping[str, PodView], memory: Memory
    ) -> Observed:
        item = record.item
        names = {entry.node for entry in item.status.assignments}
        names |= {pod.node for pod in pods.values()}
        names.discard("")
        nodes = {name: self._stores.node(name) for name in names}
        report = self._report(item, pods)
        return Observed(
            pods=with_problems(item, pods, self._stores.config_maps),
            taken_names=frozenset(memory.taken_names),
            lost_nodes=frozenset(
                name for name, node in nodes.items() if node is None or self._is_lost(node)
            ),
            cordoned_nodes=frozenset(
                name for name, node in nodes.items() if node is not None and node.is_cordoned
            ),
            report=report,
            templates=self._templates(item),
            requests=self._requests(item),
            obstacle=obstacle_of(record, self._stores, self._policy.current),
            rejection=memory.rejection or record.refusal,
            is_queued_elsewhere=record.has_own_queue,
            queue_wait=self._queueing.waiting_of(record),
        )

    def _is_lost(self, node: NodeRecord) -> bool:
        since_s = (self._now() - node.ready_time).total_seconds()
        return not node.is_ready and since_s >= self._node_lost_s

    def _with_named_checkpoints(self, record: WorkloadRecord) -> WorkloadRecord:
        """Return a job with the checkpoints in its status that it names by other jobs."""
        item = record.item
        if not isinstance(item, ObservedJob):
            return record
        status = note_found(item, lambda name: self._stores.job(item.key.namespace, name))
        return replace(record, item=replace(item, status=status))

    def _report(
        self, item: ObservedJob | ObservedPool, pods: Mapping[str, PodView]
    ) -> Report | None:
        """Return the driver's last report, a fresh one if it has ended: nothing comes after it."""
        if not isinstance(item, ObservedJob):
            return None
        driver = item.status.assigned_to(DRIVER, 0)
        pod = pods.get(driver.pod) if driver is not None else None
        if pod is not None and pod.has_ended and item.status.phase not in ENDED:
            try:
                self.take_reports(self._scheduler.reports([self._identity(item)]))
            except SchedulerError as error:
                raise RetryLaterError(str(error)) from error
        with self._lock:
            return self._reports.get(item.uid)

    def _apply(
        self, record: WorkloadRecord, plan: Plan, memory: Memory, now: datetime.datetime
    ) -> None:
        item = record.item
        if plan.delete_self:
            self._delete_workload(item)
            return
        for deletion in plan.delete:
            self._election.require()
            gone = self._cluster.delete(
                PODS,
                item.key.namespace,
                deletion.name,
                uid=deletion.uid,
                grace_s=deletion.grace_s,
            )
            if gone is not None and gone.get("kind") == "Pod":
                self._stores.note(PODS, gone)
        self._keys.delete_secret(item, plan, memory)
        try:
            self._settle_keys(item, plan, memory)
            if plan.create and item.spec is not None:
                owner = self._owner(item, plan.status)
                self._pods.create(item, owner, plan.create, memory)
            problem = ""
        except (SchedulerError, RetryLaterError) as error:
            problem = str(error)
        status = plan.status
        if plan.create and plan.takes_uids:
            views = self._stores.pods_of(item.uid)
            status = with_uids(status, {view.name: view.uid for view in views})
        if problem and status.phase not in ENDED:
            status = replace(status, waiting_for=problem)
        self._writer.write(record, status)
        for event in plan.events:
            self._events.record(item.key, item.uid, event, now)
        if problem:
            raise RetryLaterError(problem)

    def _delete_workload(self, item: ObservedJob | ObservedPool) -> None:
        self._election.require()
        resource = JOBS if item.key.kind == JOB_KIND else POOLS
        if isinstance(item, ObservedJob):
            try:
                self._scheduler.forget(self._identity(item))
            except SchedulerError as error:
                raise RetryLaterError(str(error)) from error
        self._cluster.delete(resource, item.key.namespace, item.key.name, uid=item.uid)

    def _settle_keys(self, item: ObservedJob | ObservedPool, plan: Plan, memory: Memory) -> None:
        if isinstance(item, ObservedJob):
            owner = self._owner(item, plan.status) if item.spec is not None else None
            self._keys.settle(item, self._identity(item), plan, memory, owner)

    def _owner(self, item: ObservedJob | ObservedPool, status: Status) -> WorkloadContext:
        assert item.spec is not None
        spec = item.spec
        if isinstance(spec, JobSpec):
            spec = with_checkpoints(spec, status.named_checkpoints)
        model = spec.model
        model_name = model.name if model is not None else ""
        if isinstance(item.spec, JobSpec) and item.spec.pool:
            pool = self._stores.pool(item.key.namespace, item.spec.pool)
            model_name = pool.spec.model.name if pool is not None and pool.spec else ""
        return WorkloadContext(
            key=item.key,
            uid=item.uid,
            project=self._project(item.key) if isinstance(item, ObservedJob) else "",
            spec=spec,
            assignments=status.assignments,
            model_name=model_name,
        )
