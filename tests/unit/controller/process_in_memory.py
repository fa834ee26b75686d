"""One process of the controller over a cluster in memory: caches, reconciler and assignment.

It has no thread: a test says which watch is told what, which workload is looked at, and when nodes
are assigned. `settle` does all of it in turn until nothing happens any more.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from tests.unit.controller.cluster_in_memory import (
    NAMESPACE,
    WATCHED,
    WATCHED_OF_KUEUE,
    Connection,
    World,
)

from tinsmith_controller.assignment.queue_config import QueueConfigFile
from tinsmith_controller.assignment_loop import AssignmentLoop
from tinsmith_controller.kube.api_client import JOBS, POOLS, WORKLOADS, ApiError
from tinsmith_controller.kube.leader_election import NotLeaderError
from tinsmith_controller.objects.caches import Caches
from tinsmith_controller.objects.conversion import AuthorCheck, allow_all
from tinsmith_controller.owned_objects import RetryLaterError
from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.reconciler import Reconciler
from tinsmith_controller.rpc.scheduler_client import JobIdentity, SchedulerError
from tinsmith_controller.status_writer import StatusWriter
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.plan.actions import Event
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Report

DEPLOYMENT = Deployment(
    scheduler_address="s:1",
    gateway_address="g:1",
    pod_root="r" * 40,
    database_secret="",
    storage_uri="file:///s",
    storage_secret="",
    image_repository="tinsmith",
    image_tag="1",
    device="cpu",
)
LIMITS = Limits(backoff_base_s=0.5)


class GoodScheduler:
    """Keys are good, and no driver reports.

    Attributes:
        problem: Why it does not answer; empty if it does.
    """

    def __init__(self) -> None:
        self.problem = ""

    def settle_keys(
        self,
        job: JobIdentity,
        epochs: Collection[int | None],
        *,
        generation: int,
        pools: Mapping[str, str],
    ) -> dict[int | None, dict[str, str]]:
        self._answer()
        return {epoch: dict.fromkeys(pools, f"key-{epoch}") for epoch in epochs}

    def key_holders(self) -> dict[str, JobIdentity]:
        return {}

    def revoke(self, key: str) -> None:
        pass

    def forget(self, job: JobIdentity) -> None:
        pass

    def reports(self, jobs: Sequence[JobIdentity]) -> dict[str, Report]:
        self._answer()
        return {}

    def _answer(self) -> None:
        if self.problem:
            raise SchedulerError(self.problem)


class Election:
    """Says what a test says."""

    def __init__(self) -> None:
        self.is_leader = True

    def require(self) -> None:
        if not self.is_leader:
            raise NotLeaderError("another one leads")


class Events:
    """Keeps what is told, as reason and message by the name of the workload."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []

    def record(self, key: NamespacedName, uid: str, event: Event, now: datetime.datetime) -> None:
        self.told.append((key.name, event.reason, event.message))


class Process:
    """A controller that began at this moment, and has listed everything."""

    def __init__(
        self,
        world: World,
        connection: Connection | None = None,
        *,
        queues: Path | None = None,
        check: AuthorCheck = allow_all,
        has_kueue: bool = False,
    ) -> None:
        self.watched = {**WATCHED, **WATCHED_OF_KUEUE} if has_kueue else WATCHED
        self.world = world
        self.connection = connection or Connection(world)
        self.election = Election()
        self.events = Events()
        self.scheduler = GoodScheduler()
        self.due: set[NamespacedName] = set()
        self.wants_assignment = True
        self.caches = Caches(
            self.connection,
            (NAMESPACE,),
            on_workload=self.due.add,
            on_capacity=self._want_assignment,
            on_gone=lambda uid: self.reconciler.forget(uid),
            check=check,
            has_kueue=has_kueue,
        )
        self.informers = dict(self.caches.informers)
        if self.caches.kueue is not None:
            self.informers |= self.caches.kueue.informers
        policy = QueueConfigFile(queues)
        writer = StatusWriter(self.connection, self.caches, self.election)
        self.reconciler = Reconciler(
            self.connection,
            self.caches,
            writer,
            self.election,
            self.scheduler,
            self.events,
            policy,
            deployment=DEPLOYMENT,
            limits=LIMITS,
            namespaces=(NAMESPACE,),
            node_lost_s=0.0,
            projects={},
            now=world.now,
        )
        self.assignment = AssignmentLoop(
            self.caches,
            writer,
            self.events,
            policy,
            defaults=DEPLOYMENT.requests,
            projects={},
            limits=LIMITS,
            now=world.now,
            clock=lambda: world.now_s,
        )
        self.cursors = dict.fromkeys(self.watched, 0)
        self.cut_off = set(self.watched)
        for plural in self.watched:
            self.relist(plural)

    def relist(self, plural: str) -> None:
        resource = self.watched[plural]
        items, version = self.connection.list(resource)
        namespace = NAMESPACE if resource in (JOBS, POOLS, WORKLOADS) else ""
        self.informers[resource].replace(namespace, items, version)
        self.cursors[plural] = int(version)
        self.cut_off.discard(plural)

    def deliver(self, plural: str, most: int = 10**9) -> None:
        """Tell the next changes of a kind, unless its watch is cut."""
        changes = self.world.changes[plural]
        if plural in self.cut_off or not changes or changes[-1][0] <= self.cursors[plural]:
            return
        informer = self.informers[self.watched[plural]]
        news = [change for change in changes if change[0] > self.cursors[plural]][:most]
        for revision, kind, body in news:
            (informer.remove if kind == "DELETED" else informer.put)(body)
            self.cursors[plural] = revision

    def cut(self) -> None:
        """End all watches; each is listed anew by `relist`."""
        self.cut_off = set(self.watched)

    def look(self, name: str, kind: str = "TrainingJob") -> float | None:
        return self.reconciler.look(NamespacedName(kind, NAMESPACE, name))

    def attempt(self, act: Callable[[], object]) -> str:
        """Do something that may fail as requests do; return how, or an empty text."""
        try:
            act()
        except (ApiError, RetryLaterError, NotLeaderError) as error:
            return str(error) or type(error).__name__
        return ""

    def settle(self, num_rounds: int = 12, step_s: float = 0.5) -> None:
        """Let the cluster and this process do all that is due, round by round."""
        for _ in range(num_rounds):
            self.world.now_s += step_s
            for plural in self.watched:
                if plural in self.cut_off:
                    self.relist(plural)
                self.deliver(plural)
            for key in sorted(self.due):
                self.due.discard(key)
                try:
                    again_s = self.reconciler.look(key)
                except (ApiError, RetryLaterError):
                    self.due.add(key)
                    raise
                if again_s is not None:
                    self.due.add(key)
            self.assignment.decide()
            for pod in self.world.of("pods"):
                self.world.advance(pod)

    def _want_assignment(self) -> None:
        self.wants_assignment = True


def status_of(world: World, name: str, plural: str = "trainingjobs") -> dict:
    return world.get(plural, NAMESPACE, name).get("status", {})
