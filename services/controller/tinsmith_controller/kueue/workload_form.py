"""The Workload of a job: what Kueue counts of its pods, and what it matches with flavors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith_controller.kueue.names import (
    JOB_UID_LABEL,
    KUEUE_GROUP,
    KUEUE_VERSION,
    pod_set_names,
    workload_name,
)
from tinsmith_jobs.naming import TEMPLATE_ANNOTATION, controller_reference
from tinsmith_jobs.plan.observed import ObservedJob
from tinsmith_jobs.spec import JobSpec, Role

_PRODUCT_LABEL = "nvidia.com/gpu.product"


@dataclass(frozen=True, slots=True)
class QueuePriority:
    """The priority of a job in its queue.

    Attributes:
        value: Its value.
        group: API group of the class that it comes from; empty if none does.
        kind: Kind of that class.
        name: Name of that class.
    """

    value: int = 0
    group: str = ""
    kind: str = ""
    name: str = ""

    @classmethod
    def of_pods(cls, name: str, value: int) -> QueuePriority:
        """Return that of a PriorityClass."""
        return cls(value, "scheduling.k8s.io", "PriorityClass", name)

    @classmethod
    def of_workloads(cls, name: str, value: int) -> QueuePriority:
        """Return that of a WorkloadPriorityClass."""
        return cls(value, KUEUE_GROUP, "WorkloadPriorityClass", name)

    @classmethod
    def read(cls, workload: Mapping[str, Any]) -> QueuePriority:
        """Return that of a Workload."""
        spec = workload.get("spec") or {}
        reference = spec.get("priorityClassRef") or {}
        parts = (str(reference.get(name) or "") for name in ("group", "kind", "name"))
        return cls(int(spec.get("priority") or 0), *parts)

    def in_a_workload(self) -> dict[str, Any]:
        """Return the fields of a Workload's spec."""
        fields: dict[str, Any] = {"priority": self.value}
        if self.name:
            reference = {"group": self.group, "kind": self.kind, "name": self.name}
            fields["priorityClassRef"] = reference
        return fields


def make_workload(
    job: ObservedJob,
    spec: JobSpec,
    queue: str,
    priority: QueuePriority,
    resources: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the Workload of a job.

    Args:
        job: The job.
        spec: What it asks for itself, without what Kueue's flavors add.
        queue: The LocalQueue that it waits in.
        priority: Its priority there.
        resources: Requests and limits of a pod, by role.
    """
    names = pod_set_names(spec.roles)
    pod_sets = [
        _pod_set(names[role.name], role, spec, resources[role.name])
        for role in spec.roles
        if role.name in names
    ]
    return {
        "apiVersion": f"{KUEUE_GROUP}/{KUEUE_VERSION}",
        "kind": "Workload",
        "metadata": {
            "name": workload_name(job.key.name, job.uid),
            "namespace": job.key.namespace,
            "labels": {JOB_UID_LABEL: job.uid},
            "annotations": {TEMPLATE_ANNOTATION: _hash(pod_sets)},
            "ownerReferences": [controller_reference(job.key, job.uid)],
        },
        "spec": {
            "podSets": pod_sets,
            "queueName": queue,
            "active": True,
            **priority.in_a_workload(),
        },
    }


def updated_workload(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Workload that follows its job; whether it is active stays its operators' choice."""
    # What operators, and later releases of Kueue, have in it stays.
    before = {k: v for k, v in (old.get("spec") or {}).items() if k != "priorityClassRef"}
    spec = {**before, **new["spec"], "active": before.get("active") is not False}
    metadata = dict(old["metadata"])
    for field in ("labels", "annotations"):
        metadata[field] = {**(metadata.get(field) or {}), **new["metadata"][field]}
    return {**old, "metadata": metadata, "spec": spec}


def _pod_set(name: str, role: Role, spec: JobSpec, resources: Mapping[str, Any]) -> dict[str, Any]:
    rules = spec.scheduling.rules_for(role)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [{"name": role.kind, "resources": dict(resources)}],
        "tolerations": [toleration.in_a_pod() for toleration in rules.tolerations],
    }
    if spec.scheduling.priority_class:
        pod["priorityClassName"] = spec.scheduling.priority_class
    if rules.node_selector:
        pod["nodeSelector"] = dict(rules.node_selector)
    if role.gpus and rules.gpu_products:
        wanted = {"key": _PRODUCT_LABEL, "operator": "In", "values": list(rules.gpu_products)}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
        pod["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        }
    return {"name": name, "count": role.replicas, "template": {"spec": pod}}


def _hash(pod_sets: object) -> str:
    return hashlib.sha256(json.dumps(pod_sets, sort_keys=True).encode()).hexdigest()[:16]
