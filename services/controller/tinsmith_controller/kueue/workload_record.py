"""Kueue's objects as values: Workloads, flavors and priorities, with the fields that matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tinsmith_controller.kube.api_client import Json
from tinsmith_controller.kueue.conditions import (
    ADMITTED,
    EVICTED,
    FINISHED,
    QUOTA_RESERVED,
    WorkloadCondition,
    decode_conditions,
)
from tinsmith_jobs.naming import JOB_KIND, TEMPLATE_ANNOTATION, NamespacedName
from tinsmith_jobs.quantities import QuantityError, parse_quantity
from tinsmith_jobs.spec import Toleration

_NO_AMOUNT = Decimal(-1)

PodSetUsage = tuple[int, tuple[tuple[str, Decimal], ...]]
"""Pods of a pod set, and what each requests, sorted by resource."""


@dataclass(frozen=True, slots=True)
class NodeRules:
    """Labels that nodes need, and taints of theirs that are tolerated."""

    labels: Mapping[str, str]
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True, slots=True)
class PodSetAssignment:
    """What Kueue gave to the pods of a pod set.

    Attributes:
        flavors: Names of the ResourceFlavors that they count against.
        has_topology: Whether Kueue chose places within a topology.
    """

    flavors: tuple[str, ...]
    has_topology: bool = False


@dataclass(frozen=True, slots=True)
class KueueWorkload:
    """A Workload that a job owns.

    Attributes:
        content: The object as the server has it.
        name: Its name.
        uid: Its uid.
        job: The job that controls it; None if none does.
        job_uid: Uid of that job.
        is_deleting: Whether it was told to go.
        is_active: Whether Kueue may admit it; its operators can deactivate it.
        queue: The LocalQueue that it waits in.
        conditions: Its conditions by type.
        pod_sets: Usage by pod set.
        form: Hash of what its pod sets were made from; empty if this controller made none.
        assignments: What was admitted, by pod set.
        updates: Further rules that admission checks ask for, by pod set.
        pending_checks: Admission checks that are not ready, as sentences.
    """

    content: Json
    name: str
    uid: str
    job: NamespacedName | None
    job_uid: str
    is_deleting: bool
    is_active: bool
    queue: str
    conditions: Mapping[str, WorkloadCondition]
    pod_sets: Mapping[str, PodSetUsage]
    form: str
    assignments: Mapping[str, PodSetAssignment]
    updates: Mapping[str, NodeRules]
    pending_checks: tuple[str, ...]

    def is_true(self, kind: str) -> bool:
        """Whether a condition is true."""
        found = self.conditions.get(kind)
        return found is not None and found.is_true

    @property
    def has_quota(self) -> bool:
        """Whether quota is reserved for it."""
        return self.is_true(QUOTA_RESERVED)

    @property
    def is_evicted(self) -> bool:
        """Whether it has to give its quota back, or has done so and was not admitted again."""
        return self.is_true(EVICTED)

    @property
    def is_admitted(self) -> bool:
        """Whether its job may run."""
        return self.is_true(ADMITTED) and not self.is_evicted and not self.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether its job is over for Kueue."""
        return self.is_true(FINISHED)


@dataclass(frozen=True, slots=True)
class FlavorRecord:
    """A ResourceFlavor: nodes of one kind."""

    name: str
    rules: NodeRules


@dataclass(frozen=True, slots=True)
class WorkloadPriorityRecord:
    """A WorkloadPriorityClass."""

    name: str
    value: int


def kueue_workload(content: Json) -> KueueWorkload:
    """Return what matters of a Workload."""
    metadata, spec = content.get("metadata") or {}, content.get("spec") or {}
    status = content.get("status") or {}
    owner = next(
        (
            entry
            for entry in metadata.get("ownerReferences") or []
            if entry.get("controller") and entry.get("kind") == JOB_KIND
        ),
        None,
    )
    namespace = str(metadata.get("namespace", ""))
    checks = status.get("admissionChecks") or []
    admission = status.get("admission") or {}
    return KueueWorkload(
        content=content,
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        job=NamespacedName(JOB_KIND, namespace, str(owner.get("name", ""))) if owner else None,
        job_uid=str(owner.get("uid", "")) if owner else "",
        is_deleting=bool(metadata.get("deletionTimestamp")),
        is_active=spec.get("active") is not False,
        queue=str(spec.get("queueName") or ""),
        conditions=decode_conditions(status),
        pod_sets=usage_of(spec),
        form=str((metadata.get("annotations") or {}).get(TEMPLATE_ANNOTATION, "")),
        assignments={
            str(entry.get("name", "")): PodSetAssignment(
                tuple(dict.fromkeys((entry.get("flavors") or {}).values())),
                bool(entry.get("topologyAssignment")),
            )
            for entry in admission.get("podSetAssignments") or []
        },
        updates=_updates(checks),
        pending_checks=tuple(
            f"the admission check {check.get('name')} is {check.get('state')}"
            + (f" ({check.get('message')})" if check.get("message") else "")
            for check in checks
            if check.get("state") != "Ready"
        ),
    )


def usage_of(spec: Mapping[str, Any]) -> dict[str, PodSetUsage]:
    """Return what the pod sets of a Workload's spec count, by name.

    Amounts are compared as numbers: Kueue's webhook writes them in another form.
    """
    found = {}
    for entry in spec.get("podSets") or []:
        containers = ((entry.get("template") or {}).get("spec") or {}).get("containers") or [{}]
        requests = (containers[0].get("resources") or {}).get("requests") or {}
        amounts = tuple(sorted((str(name), _amount(text)) for name, text in requests.items()))
        found[str(entry.get("name", ""))] = (int(entry.get("count") or 0), amounts)
    return found


def _amount(text: object) -> Decimal:
    try:
        return parse_quantity(text)
    except QuantityError:
        return _NO_AMOUNT


def flavor_record(content: Json) -> FlavorRecord:
    """Return what matters of a ResourceFlavor."""
    spec = content.get("spec") or {}
    return FlavorRecord(
        str((content.get("metadata") or {}).get("name", "")),
        _rules(spec.get("nodeLabels"), spec.get("tolerations")),
    )


def workload_priority_record(content: Json) -> WorkloadPriorityRecord:
    """Return what matters of a WorkloadPriorityClass."""
    return WorkloadPriorityRecord(
        str((content.get("metadata") or {}).get("name", "")), int(content.get("value") or 0)
    )


def _updates(checks: list[Mapping[str, Any]]) -> dict[str, NodeRules]:
    found: dict[str, NodeRules] = {}
    for update in (each for check in checks for each in check.get("podSetUpdates") or []):
        name = str(update.get("name", ""))
        new = _rules(update.get("nodeSelector"), update.get("tolerations"))
        old = found.get(name, NodeRules({}))
        found[name] = NodeRules({**old.labels, **new.labels}, (*old.tolerations, *new.tolerations))
    return found


def _rules(labels: Any, tolerations: Any) -> NodeRules:
    return NodeRules(
        {str(key): str(value) for key, value in (labels or {}).items()},
        tuple(
            Toleration(
                key=str(each.get("key") or ""),
                operator=str(each.get("operator") or "Equal"),
                value=str(each.get("value") or ""),
                effect=str(each.get("effect") or ""),
                seconds=each.get("tolerationSeconds"),
            )
            for each in tolerations or []
        ),
    )
