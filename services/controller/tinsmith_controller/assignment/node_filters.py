"""Node filters: whether a node is eligible for a pod, apart from its free capacity."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence

from tinsmith_controller.assignment.types import DescribedNode, Node, Taint
from tinsmith_jobs.quantities import GIB
from tinsmith_jobs.spec import Rules, Toleration

# `PreferNoSchedule` only asks for something else if there is; it keeps no pod away.
_REPELLING_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


class Obstacle(enum.Enum):
    """Why a node will not do. In this order they are looked at, the lasting ones first."""

    PRODUCT = "product"
    GPU_MEMORY = "gpu memory"
    MODEL = "model"
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


def repelling(taints: Iterable[Taint], rules: Rules) -> list[Taint]:
    """Return the taints that keep a pod with some rules away."""
    return [
        taint
        for taint in taints
        if taint.effect in _REPELLING_EFFECTS
        and not any(tolerates(toleration, taint) for toleration in rules.tolerations)
    ]


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
    if has_gpus and not _holds(node, rules.least_gpu_bytes):
        return Obstacle.MODEL
    if any(node.labels.get(key) != value for key, value in rules.node_selector.items()):
        return Obstacle.SELECTOR
    if node.is_cordoned:
        return Obstacle.CORDON
    if not node.is_ready:
        return Obstacle.NOT_READY
    return Obstacle.TAINT if repelling(node.taints, rules) else None


def _holds(node: DescribedNode, least_bytes: int) -> bool:
    """Whether a GPU of a node holds so much; where its memory is not known, it may."""
    # Half a GiB more than it says: that number is rounded.
    return not node.gpu_memory_gib or (node.gpu_memory_gib + 0.5) * GIB >= least_bytes


def unmet_rules(nodes: Sequence[DescribedNode], rules: Rules, *, has_gpus: bool) -> list[str]:
    """Return a sentence about each rule that not a single node meets, each rule by itself.

    Args:
        nodes: All nodes; without any, rules are not what is missing.
        rules: Those of a workload.
        has_gpus: Whether its pods have any; rules about GPUs are not about others.
    """
    if not nodes:
        return []
    found = []
    products = rules.gpu_products if has_gpus else ()
    if products and not any(node.gpu_product in products for node in nodes):
        found.append(no_product(products, nodes))
    if has_gpus and not any(node.gpu_memory_gib >= rules.min_gpu_memory_gib for node in nodes):
        found.append(no_memory(rules.min_gpu_memory_gib, nodes))
    # Without GPUs no node is too small.
    with_gpus = [node for node in nodes if node.allocatable.gpus] if has_gpus else []
    if with_gpus and not any(_holds(node, rules.least_gpu_bytes) for node in with_gpus):
        found.append(no_model(rules.least_gpu_bytes, nodes))
    labels = rules.node_selector.items()
    if not any(all(node.labels.get(key) == value for key, value in labels) for node in nodes):
        found.append(no_labels(labels))
    return found


def no_product(products: Iterable[str], nodes: Iterable[DescribedNode]) -> str:
    """Return that no node has one of some products, and which there are."""
    counts = Counter(node.gpu_product for node in nodes if node.gpu_product)
    there = [f"{name} ({num} node{'s' if num > 1 else ''})" for name, num in sorted(counts.items())]
    wanted = " or ".join(sorted(products))
    return f"no node has the product {wanted}; {there_are(there) if there else 'none is known'}"


def no_memory(min_gib: int, nodes: Iterable[DescribedNode]) -> str:
    """Return that no node has GPUs with so much memory, and how much there is."""
    largest = max(node.gpu_memory_gib for node in nodes)
    have = f"the largest have {largest} GiB" if largest else "how much they have is not known"
    return f"no node has GPUs with {min_gib} GiB: {have}"


def no_model(least_bytes: int, nodes: Iterable[DescribedNode]) -> str:
    """Return that no node has GPUs that hold a model, how much that takes, and what to do."""
    largest = max(node.gpu_memory_gib for node in nodes)
    return (
        f"no node has GPUs that hold the model: it takes {least_bytes / GIB:.1f} GiB of each, and "
        f"the largest have {largest} GiB; give each pod more GPUs, or take a smaller model"
    )


def no_labels(labels: Iterable[tuple[str, str]]) -> str:
    """Return that no node has some labels."""
    wanted = " and ".join(f"{key}={value}" for key, value in sorted(labels))
    return f"no node that would do has the label {wanted}"


def there_are(names: Sequence[str]) -> str:
    """Return what there is, as the end of a sentence."""
    return f"there {'is' if len(names) == 1 else 'are'} {join(names)}"


def join(names: Sequence[str]) -> str:
    """Return names as a list of words."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
