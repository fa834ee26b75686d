"""Node filters: whether a node is eligible for a pod, apart from its free capacity."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from tinsmith_controller.assignment.types import Node, Taint
from tinsmith_jobs.spec import Rules, Toleration

# `PreferNoSchedule` only asks for something else if there is; it keeps no pod away.
_REPELLING_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


class Obstacle(enum.Enum):
    """Why a node will not do. In this order they are looked at, the lasting ones first."""

    PRODUCT = "product"
    GPU_MEMORY = "gpu memory"
    SELECTOR = "selector"
    CORDON = "cordon"
    NOT_READY = "not ready"
    TAINT = "taint"
    AVOIDED = "avoided"


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Whether the one outweighs the other.

    An operator that it does not know tolerates nothing.

    Source: `ToleratesTaint` of k8s.io/api/core/v1.
    """
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    return toleration.operator in ("", "Equal") and toleration.value == taint.value


def is_repelled(taints: Iterable[Taint], tolerations: Iterable[Toleration]) -> bool:
    """Whether one of the taints keeps a pod with these tolerations away."""
    tolerations = tuple(tolerations)
    return any(
        taint.effect in _REPELLING_EFFECTS
        and not any(tolerates(toleration, taint) for toleration in tolerations)
        for taint in taints
    )


def find_obstacle(node: Node, rules: Rules, *, has_gpus: bool) -> Obstacle | None:
    """Return the first reason why a node of this kind will not do, or None if it will.

    Avoided nodes are not considered here, because they are given by name. A cordon holds even for
    pods that tolerate its taint: an operator wants the node empty.

    Args:
        node: The node.
        rules: Those of the pod's workload.
        has_gpus: Whether the pod has any; rules about GPUs are not about others.
    """
    if has_gpus and rules.gpu_products and node.gpu_product not in rules.gpu_products:
        return Obstacle.PRODUCT
    if has_gpus and node.gpu_memory_gib < rules.min_gpu_memory_gib:
        return Obstacle.GPU_MEMORY
    if any(node.labels.get(key) != value for key, value in rules.node_selector.items()):
        return Obstacle.SELECTOR
    if node.is_cordoned:
        return Obstacle.CORDON
    if not node.is_ready:
        return Obstacle.NOT_READY
    return Obstacle.TAINT if is_repelled(node.taints, rules.tolerations) else None
