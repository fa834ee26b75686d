"""Converts objects of the cluster into values: our own wholly, of others the fields that matter."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith_controller.assignment.types import DescribedNode, Taint
from tinsmith_controller.kube.api_client import Json
from tinsmith_controller.kueue.names import PRIORITY_LABEL, QUEUE_LABEL
from tinsmith_controller.objects.pod_outcome import outcome, unpulled_image
from tinsmith_jobs.accepted_spec import HeldSpec, held_job_spec, held_pool_spec
from tinsmith_jobs.naming import (
    INDEX_LABEL,
    JOB_KIND,
    POOL_KIND,
    RETRY_ANNOTATION,
    ROLE_LABEL,
    TEMPLATE_ANNOTATION,
    NamespacedName,
)
from tinsmith_jobs.plan.observed import DISRUPTION, ObservedJob, ObservedPool, PodPhase, PodView
from tinsmith_jobs.plan.termination import MAX_PROBLEM
from tinsmith_jobs.quantities import QuantityError, Resources
from tinsmith_jobs.spec import JobSpec
from tinsmith_jobs.spec_codec import is_left_alone
from tinsmith_jobs.status_codec import decode_status, decode_time

_PRODUCT_LABEL = "nvidia.com/gpu.product"
_MEMORY_LABEL = "nvidia.com/gpu.memory"
"""In MiB, as NVIDIA's feature discovery writes it."""
_EPOCH_TIME = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_DISRUPTIONS = frozenset({"Shutdown", "NodeShutdown", "Terminated", "Preempting"})
"""Why kubelets end or refuse pods that have done nothing wrong; since 1.26 a condition says so."""
_EVICTED, _OF_NODE = "Evicted", ("The node was low on", "The node had condition")
"""Pods are evicted for what they use themselves, too, and then the message begins otherwise."""
_DEADLINE = "DeadlineExceeded"


@dataclass(frozen=True, slots=True)
class WorkloadRecord:
    """A job or pool, decoded once for each of its versions.

    Attributes:
        content: The object as the server has it.
        item: The job or pool.
        is_left_alone: Whether another controller manages it.
        queue: The queue of Kueue that it names; empty if it has none.
        queue_priority: The priority class of Kueue that it names; empty if it has none.
        queue_obstacle: Why that queue lets it have no pods now; empty if it may, or has no queue.
        refusal: Why the operators do not let it run; empty if they do.
    """

    content: Json
    item: ObservedJob | ObservedPool
    is_left_alone: bool = False
    refusal: str = ""
    queue: str = ""
    queue_priority: str = ""
    queue_obstacle: str = ""

    @property
    def has_own_queue(self) -> bool:
        """Whether another system's queue decides when it runs."""
        return bool(self.queue)


@dataclass(frozen=True, slots=True)
class PodRecord:
    """A pod of the cluster, ours or not.

    Attributes:
        owner: The workload that controls it; None if it is not ours.
        owner_uid: Uid of that workload.
        view: What plans see of it.
        node: Where it is bound.
        resources: What it asks of its node.
        has_ended: Whether it uses its node no more.
    """

    owner: NamespacedName | None
    owner_uid: str
    view: PodView
    node: str
    resources: Resources
    has_ended: bool


@dataclass(frozen=True, slots=True)
class NodeRecord(DescribedNode):
    """A node."""

    ready_time: datetime.datetime = _EPOCH_TIME
    """When it last became ready, or ceased to be."""


@dataclass(frozen=True, slots=True)
class PriorityRecord:
    """A PriorityClass."""

    name: str
    value: int
    is_default: bool


AuthorCheck = Callable[[JobSpec, bool], str]
"""Says why a job may not be run that has the label of Kueue, or has not; empty if it may."""


def allow_all(spec: JobSpec, has_kueue_label: bool) -> str:
    """Return that any job may be run."""
    del spec, has_kueue_label
    return ""


def workload_record(content: Json, check: AuthorCheck = allow_all) -> WorkloadRecord:
    """Return a job or pool; one that cannot be run has a sentence instead of a spec."""
    metadata, spec = content.get("metadata") or {}, content.get("spec")
    is_pool = content.get("kind") != JOB_KIND
    name = str(metadata.get("name", ""))
    status = decode_status(content.get("status"), is_pool=is_pool)
    labels = metadata.get("labels") or {}
    has_queue_label = not is_pool and QUEUE_LABEL in labels
    held: HeldSpec[Any] = (
        held_pool_spec(name, spec, status.accepted_spec)
        if is_pool
        else held_job_spec(
            name,
            spec,
            status.accepted_spec,
            lambda job: check(job, has_queue_label),
            has_begun=status.start_time is not None,
        )
    )
    fields: dict[str, Any] = {
        "key": NamespacedName(
            POOL_KIND if is_pool else JOB_KIND, str(metadata.get("namespace", "")), name
        ),
        "uid": str(metadata.get("uid", "")),
        "generation": int(metadata.get("generation") or 0),
        "created": decode_time(metadata.get("creationTimestamp")) or _EPOCH_TIME,
        "is_deleting": bool(metadata.get("deletionTimestamp")),
        "spec": held.spec,
        "spec_error": held.spec_error,
        "status": status,
        "spec_text": held.text,
        "edit_error": held.edit_error,
    }
    if is_pool:
        return WorkloadRecord(content, ObservedPool(**fields))
    asked = (metadata.get("annotations") or {}).get(RETRY_ANNOTATION)
    return WorkloadRecord(
        content,
        ObservedJob(**fields, retried_end=decode_time(asked)),
        is_left_alone=is_left_alone(spec),
        refusal=check(held.spec, has_queue_label) if held.spec is not None else "",
        queue=str(labels.get(QUEUE_LABEL) or ""),
        queue_priority=str(labels.get(PRIORITY_LABEL) or ""),
    )


def pod_record(content: Json) -> PodRecord:
    """Return what matters of a pod."""
    metadata, spec = content.get("metadata") or {}, content.get("spec") or {}
    status = content.get("status") or {}
    owner, owner_uid = _owner(metadata)
    phase = _phase(status.get("phase"))
    labels = metadata.get("labels") or {}
    index = str(labels.get(INDEX_LABEL, "0"))
    role = (metadata.get("annotations") or {}).get(ROLE_LABEL) or labels.get(ROLE_LABEL, "")
    exit_code, problem = outcome(status)
    unscheduled = _unscheduled(status)
    node = str(spec.get("nodeName") or "")
    conditions = frozenset(
        str(entry.get("type"))
        for entry in status.get("conditions") or []
        if entry.get("status") == "True"
    )
    reason = str(status.get("reason") or "") if phase is PodPhase.FAILED else ""
    message = str(status.get("message") or "")
    if reason in _DISRUPTIONS or (reason == _EVICTED and message.startswith(_OF_NODE)):
        conditions |= {DISRUPTION}
    # Kubelets give a reason to the pod itself when they, and not its containers, ended it.
    is_turned_away = bool(reason) and reason != _DEADLINE
    view = PodView(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        role=str(role),
        index=_number(index),
        phase=phase,
        is_ready="Ready" in conditions,
        is_deleting=bool(metadata.get("deletionTimestamp")),
        end_by=decode_time(metadata.get("deletionTimestamp")),
        node=node,
        exit_code=exit_code,
        problem=problem or str(unscheduled.get("message") or "")[:MAX_PROBLEM],
        conditions=conditions,
        template=str((metadata.get("annotations") or {}).get(TEMPLATE_ANNOTATION, "")),
        unschedulable_since=None if node else decode_time(unscheduled.get("lastTransitionTime")),
        unpulled_image=unpulled_image(spec, status),
        is_turned_away=is_turned_away,
        is_refused=is_turned_away and reason != _EVICTED and reason not in _DISRUPTIONS,
    )
    return PodRecord(owner, owner_uid, view, node, _requested(spec), view.has_ended)


def node_record(content: Json) -> NodeRecord:
    """Return what matters of a node."""
    metadata, spec = content.get("metadata") or {}, content.get("spec") or {}
    status = content.get("status") or {}
    labels = {str(key): str(value) for key, value in (metadata.get("labels") or {}).items()}
    conditions = {entry.get("type"): entry for entry in status.get("conditions") or []}
    ready = conditions.get("Ready") or {}
    memory_mib = labels.get(_MEMORY_LABEL, "")
    return NodeRecord(
        name=str(metadata.get("name", "")),
        allocatable=_parsed(status.get("allocatable") or {}),
        labels=labels,
        taints=tuple(
            Taint(str(e.get("key", "")), str(e.get("value") or ""), str(e.get("effect") or ""))
            for e in spec.get("taints") or []
        ),
        is_ready=ready.get("status") == "True",
        ready_time=decode_time(ready.get("lastTransitionTime")) or _EPOCH_TIME,
        is_cordoned=bool(spec.get("unschedulable")),
        gpu_product=labels.get(_PRODUCT_LABEL, ""),
        gpu_memory_gib=round(_number(memory_mib) / 1024),
    )


def priority_record(content: Json) -> PriorityRecord:
    """Return a PriorityClass."""
    metadata = content.get("metadata") or {}
    return PriorityRecord(
        str(metadata.get("name", "")),
        int(content.get("value") or 0),
        bool(content.get("globalDefault")),
    )


def _owner(metadata: Mapping[str, Any]) -> tuple[NamespacedName | None, str]:
    for reference in metadata.get("ownerReferences") or []:
        if reference.get("controller") and reference.get("kind") in (JOB_KIND, POOL_KIND):
            key = NamespacedName(
                str(reference["kind"]),
                str(metadata.get("namespace", "")),
                str(reference.get("name", "")),
            )
            return key, str(reference.get("uid", ""))
    return None, ""


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


def _phase(value: object) -> PodPhase:
    try:
        return PodPhase(value)
    except ValueError:
        return PodPhase.PENDING


def _unscheduled(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the condition of a pod that has no node; empty if it does not say so."""
    for entry in status.get("conditions") or []:
        if entry.get("type") == "PodScheduled" and entry.get("status") == "False":
            return dict(entry)
    return {}


def _requested(spec: Mapping[str, Any]) -> Resources:
    """Return what a pod asks of its node: its containers together, or its largest first step.

    A first step that goes on beside the containers (a sidecar) counts with them.
    """
    firsts = spec.get("initContainers") or []
    sidecars = [entry for entry in firsts if entry.get("restartPolicy") == "Always"]
    total = Resources(pods=1)
    for container in [*(spec.get("containers") or []), *sidecars]:
        total += _asked(container)
    for container in firsts:
        first = _asked(container)
        total = Resources(
            max(total.cpu_milli, first.cpu_milli),
            max(total.memory_bytes, first.memory_bytes),
            max(total.gpus, first.gpus),
            1,
        )
    return total + _parsed(spec.get("overhead") or {}, pods=0)


def _asked(container: Mapping[str, Any]) -> Resources:
    resources = container.get("resources") or {}
    return _parsed({**(resources.get("limits") or {}), **(resources.get("requests") or {})}, pods=0)


def _parsed(amounts: Mapping[str, Any], *, pods: int | None = None) -> Resources:
    try:
        return Resources.parse(dict(amounts), pods=pods)
    except QuantityError:
        return Resources(pods=pods or 0)
