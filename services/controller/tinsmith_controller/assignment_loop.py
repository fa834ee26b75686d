"""Assigns nodes for the whole cluster, and writes the decisions into the statuses of workloads."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from tinsmith_controller.assignment.healing import decide_and_heal
from tinsmith_controller.assignment.queue_config import QueueConfigFile
from tinsmith_controller.assignment.types import Decisions
from tinsmith_controller.assignment_snapshot import (
    Snapshot,
    decided_statuses,
    may_get_nodes,
    policy_of,
    take_snapshot,
)
from tinsmith_controller.kube.api_client import ApiError
from tinsmith_controller.metrics import (
    ASSIGNMENT_SECONDS,
    DECISIONS,
    GPUS,
    JOBS,
    NODES,
    WAITING_JOBS,
)
from tinsmith_controller.objects.caches import Caches
from tinsmith_controller.objects.conversion import WorkloadRecord
from tinsmith_controller.objects.events import EventRecorder
from tinsmith_controller.objects.obstacles import obstacle_of
from tinsmith_controller.status_writer import StatusWriter
from tinsmith_jobs.conditions import WAITING, Phase
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.plan.actions import Event
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import ObservedJob, ObservedPool
from tinsmith_jobs.spec import JobSpec
from tinsmith_jobs.status import Status

logger = logging.getLogger(__name__)

_SENTENCE_INTERVAL_S = 5.0
"""Numbers in the sentences of waiting jobs change all the time; each is written this often."""


class AssignmentLoop:
    """Assigns nodes, again and again: reads all objects, decides, and writes statuses.

    Args:
        stores: Copies of the cluster's objects.
        writer: Writes statuses.
        events: Tells what jobs wait for.
        policy: The operators' settings.
        defaults: Requests by kind of role.
        projects: Project by namespace.
        limits: Settings of plans.
        now: The time of day.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        stores: Caches,
        writer: StatusWriter,
        events: EventRecorder,
        policy: QueueConfigFile,
        *,
        defaults: Mapping[str, Mapping[str, str]],
        projects: Mapping[str, str],
        limits: Limits,
        now: Callable[[], datetime.datetime],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = stores
        self._writer = writer
        self._events = events
        self._policy = policy
        self._defaults = defaults
        self._projects = projects
        self._limits = limits
        self._now = now
        self._clock = clock
        self._said_s: dict[NamespacedName, float] = {}
        self._told: dict[NamespacedName, tuple[str, datetime.datetime | None]] = {}

    def decide(self) -> float | None:
        """Decide once; return when to decide again though nothing happens.

        Nothing is decided while the outcome of a write is not known: what it gave away would count
        as free.

        Raises:
            ApiError: If a status cannot be written, or it is not known whether it was.
            NotLeaderError: If this replica may not act any more.
        """
        self._writer.settle_all()
        self._fence()
        records = {record.item.key: record for record in self._stores.workloads()}
        now = self._now()
        policy = self._policy.current()
        view = take_snapshot(
            records.values(),
            self._stores.pods(),
            self._stores.nodes(),
            self._stores.priorities(),
            blocked={
                key
                for key, record in records.items()
                if obstacle_of(record, self._stores, lambda: policy)
            },
            defaults=self._defaults,
            projects=self._projects,
            limits=self._limits,
            now=now,
        )
        begin_s = self._clock()
        decisions = decide_and_heal(view.workloads, view.nodes, policy_of(policy), now)
        ASSIGNMENT_SECONDS.observe(self._clock() - begin_s)
        is_complete = self._write(records, decisions, now)
        _measure(records, view)
        if decisions.waiting and not is_complete:
            return _SENTENCE_INTERVAL_S
        return None

    def _fence(self) -> None:
        """Give a new version to all that the leader before may still give nodes to.

        A write of its can be under way for as long as it likes: the version of which it was decided
        is gone. What changed since this process listed everything has another version already.
        """
        for record in self._stores.workloads():
            status = record.item.status
            if not may_get_nodes(record) or not self._stores.is_of_first_list(record):
                continue
            token = (status.fencing_token or 0) + 1
            try:
                self._writer.write(record, replace(status, fencing_token=token))
            except ApiError as error:
                if error.is_invalid:
                    _log_refusal(record.item.key, error)
                elif not (error.is_conflict or error.is_not_found):
                    raise

    def _write(
        self,
        records: Mapping[NamespacedName, WorkloadRecord],
        decisions: Decisions,
        now: datetime.datetime,
    ) -> bool:
        """Write what was decided; return whether nothing was put off."""
        items = {key: record.item for key, record in records.items()}
        changed = decided_statuses(items, decisions, now)
        is_complete = True
        for key, status in changed.items():
            is_sentence = not any(
                key in each for each in (decisions.assign, decisions.preempt, decisions.given_back)
            )
            if is_sentence and not self._may_say(key, records[key], status):
                is_complete = False
                continue
            try:
                self._writer.write(records[key], status)
            except ApiError as error:
                if error.is_invalid:
                    # Other workloads do not wait for one whose status the server refuses, unless
                    # they are to have what it gives back.
                    _log_refusal(key, error)
                    if key in decisions.given_back:
                        return False
                elif error.is_conflict:
                    # The copies were behind, so what the rest takes for free may not be. The copy
                    # is new now, which wakes this decision again.
                    return False
                elif not error.is_not_found:
                    raise
                continue
            self._count(key, decisions)
            if is_sentence and isinstance(items[key], ObservedJob):
                self._tell(items[key], status.waiting_for, now)
        self._said_s = {key: time_s for key, time_s in self._said_s.items() if key in records}
        self._told = {key: wait for key, wait in self._told.items() if key in records}
        return is_complete

    def _may_say(self, key: NamespacedName, record: WorkloadRecord, status: Status) -> bool:
        now_s = self._clock()
        before = record.item.status.waiting_for
        first = not before or before.startswith("waits for the next assignment")
        is_due = now_s - self._said_s.get(key, float("-inf")) >= _SENTENCE_INTERVAL_S
        if not status.waiting_for or not (first or is_due):
            return False
        self._said_s[key] = now_s
        return True

    def _tell(
        self, item: ObservedJob | ObservedPool, sentence: str, now: datetime.datetime
    ) -> None:
        """Write one event for each time that a job waits: numbers in sentences change all the time.

        What it waits for later is in its status.
        """
        wait = (item.uid, item.status.queued_time)
        if self._told.get(item.key) != wait:
            self._told[item.key] = wait
            self._events.record(item.key, item.uid, Event(WAITING, sentence), now)

    def _count(self, key: NamespacedName, decisions: Decisions) -> None:
        if key in decisions.assign:
            DECISIONS.labels("assigned").inc()
            logger.info(
                "nodes assigned",
                extra={"workload": str(key), "num_pods": len(decisions.assign[key])},
            )
        elif key in decisions.given_back:
            DECISIONS.labels("given_back").inc()
            logger.info("nodes given back", extra={"workload": str(key)})
        elif key in decisions.preempt:
            DECISIONS.labels("preempted").inc()
            logger.info(
                "preempted", extra={"workload": str(key), "by": str(decisions.preempt[key])}
            )


def _log_refusal(key: NamespacedName, error: ApiError) -> None:
    logger.error("status refused", extra={"workload": str(key), "problem": str(error)})


def _measure(records: Mapping[NamespacedName, WorkloadRecord], view: Snapshot) -> None:
    phases = dict.fromkeys((phase.value for phase in Phase), 0)
    queues: dict[str, int] = {}
    for record in records.values():
        item = record.item
        if not isinstance(item, ObservedJob):
            continue
        phases[item.status.phase.value] += 1
        if item.status.phase is Phase.QUEUED and isinstance(item.spec, JobSpec):
            queue = item.spec.scheduling.queue
            queues[queue] = queues.get(queue, 0) + 1
    for phase, count in phases.items():
        JOBS.labels(phase).set(count)
    WAITING_JOBS.clear()
    for queue, count in queues.items():
        WAITING_JOBS.labels(queue).set(count)
    ready = [node for node in view.nodes if node.is_ready]
    GPUS.labels("allocatable").set(sum(node.allocatable.gpus for node in ready))
    GPUS.labels("others").set(sum(node.used.gpus for node in ready))
    GPUS.labels("assigned").set(sum(workload.num_gpus_held for workload in view.workloads))
    NODES.labels("ready").set(len(ready))
    NODES.labels("lost").set(len(view.nodes) - len(ready))
    NODES.labels("cordoned").set(sum(node.is_cordoned for node in view.nodes))
