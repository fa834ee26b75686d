"""Short ways to say nodes and workloads."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith_controller.assignment.decide import decide
from tinsmith_controller.assignment.types import (
    Decisions,
    Node,
    PodRequest,
    QueueConfig,
    Stage,
    Workload,
)
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec import Rules
from tinsmith_jobs.status import Binding

NOW = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
GIB = 2**30


def ago(num_seconds: float) -> datetime.datetime:
    return NOW - datetime.timedelta(seconds=num_seconds)


def resources(gpus: int = 0, *, cpus: int = 1, memory_gib: int = 1) -> Resources:
    return Resources(cpu_milli=cpus * 1000, memory_bytes=memory_gib * GIB, gpus=gpus, pods=1)


def node(name: str, gpus: int = 8, *, cpus: int = 96, pods: int = 110, **fields: Any) -> Node:
    allocatable = Resources(cpu_milli=cpus * 1000, memory_bytes=1024 * GIB, gpus=gpus, pods=pods)
    return Node(
        name, allocatable, **{"gpu_product": "NVIDIA-H200", "gpu_memory_gib": 141, **fields}
    )


def nodes(count: int, gpus: int = 8, **fields: Any) -> list[Node]:
    return [node(f"n{i}", gpus, **fields) for i in range(count)]


def racks(count: int, each: int, gpus: int = 8) -> list[Node]:
    return [
        node(f"r{rack}n{i}", gpus, labels={"rack": f"r{rack}"})
        for rack in range(count)
        for i in range(each)
    ]


def key(name: str, kind: str = "TrainingJob") -> NamespacedName:
    return NamespacedName(kind, "team", name)


def pods(gpus: Sequence[int], **amounts: int) -> tuple[PodRequest, ...]:
    return tuple(PodRequest("trainer", i, resources(g, **amounts)) for i, g in enumerate(gpus))


def job(
    name: str,
    gpus: Sequence[int] = (),
    *,
    on: Mapping[str, int] | Sequence[tuple[str, int]] = (),
    waited_s: float = 0,
    ran_s: float = 3600,
    stage: Stage | None = None,
    project: str = "p",
    queue: str = "default",
    priority: int = 0,
    rules: Rules | None = None,
    amounts: Mapping[str, int] | None = None,
    **fields: Any,
) -> Workload:
    """Return a job that wants pods with these GPUs; `on` is what it holds already, by node."""
    held = tuple(on.items()) if isinstance(on, Mapping) else tuple(on)
    placed = tuple(
        Binding("trainer", 100 + i, where, resources(g, **(amounts or {})))
        for i, (where, g) in enumerate(held)
    )
    return Workload(
        key=key(name),
        project=project,
        queue=queue,
        priority=priority,
        created=ago(100_000),
        queued=ago(max(waited_s, ran_s) if placed else waited_s),
        stage=stage or (Stage.HOLDING if placed else Stage.WAITING),
        pods=pods(gpus, **(amounts or {})),
        placed=placed,
        rules=rules or Rules(),
        assigned=ago(ran_s) if placed else None,
        **fields,
    )


def pool(name: str, gpus: Sequence[int] = (), **fields: Any) -> Workload:
    made = job(name, gpus, **{"project": "", "is_gang": False, "is_preemptible": False, **fields})
    return dataclasses.replace(made, key=key(name, "TrainerPool"))


def decided(
    workloads: Sequence[Workload], on: Sequence[Node], policy: QueueConfig | None = None
) -> Decisions:
    return decide(workloads, on, policy or QueueConfig(), NOW)


def given(decisions: Decisions) -> dict[str, list[str]]:
    """Return the nodes that each workload was given, by its name."""
    return {
        key.name: sorted(binding.node for binding in bindings)
        for key, bindings in decisions.assign.items()
    }


def victims(decisions: Decisions) -> dict[str, str]:
    return {victim.name: for_whom.name for victim, for_whom in decisions.preempt.items()}


def waiting(decisions: Decisions) -> dict[str, str]:
    return {key.name: sentence for key, sentence in decisions.waiting.items()}
