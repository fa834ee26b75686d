"""Nodes that exist in the API alone."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.e2e.cluster.api import Json

_UNREACHABLE = "node.kubernetes.io/unreachable"


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeNode:
    """What a node says of itself.

    Attributes:
        gpus: Number of `nvidia.com/gpu`.
        labels: Beside `kubernetes.io/hostname`, which every node has.
        taints: Such as `{"key": "gpu", "value": "true", "effect": "NoSchedule"}`.
        resources: Further resources by name, or other amounts of the usual ones.
    """

    name: str
    gpus: int = 0
    cpu: str = "64"
    memory: str = "512Gi"
    pods: int = 110
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    resources: Mapping[str, str] = field(default_factory=dict)


def node_object(node: FakeNode, address: str, port: int) -> Json:
    """Return the Node as a kubelet registers it; `port` is that of its API, 0 for none."""
    resources = {"cpu": node.cpu, "memory": node.memory, "pods": str(node.pods)}
    if node.gpus:
        resources["nvidia.com/gpu"] = str(node.gpus)
    resources.update(node.resources)
    labels = {"kubernetes.io/hostname": node.name, "kubernetes.io/os": "linux", **node.labels}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": labels},
        "spec": {"taints": list(node.taints)},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [ready_condition("True")],
            "addresses": [
                {"type": "InternalIP", "address": address},
                {"type": "Hostname", "address": node.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        },
    }


def ready_condition(status: str) -> Json:
    """Return the condition `Ready`: a kubelet sets True, the node controller Unknown."""
    return {
        "type": "Ready",
        "status": status,
        "reason": "KubeletReady" if status == "True" else "NodeStatusUnknown",
        "message": "" if status == "True" else "Kubelet stopped posting node status.",
        "lastHeartbeatTime": timestamp(),
        "lastTransitionTime": timestamp(),
    }


def unreachable_taints() -> list[Json]:
    """Return the taints of a node whose kubelet is silent."""
    return [{"key": _UNREACHABLE, "effect": effect} for effect in ("NoSchedule", "NoExecute")]


def timestamp() -> str:
    """Return this moment as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
