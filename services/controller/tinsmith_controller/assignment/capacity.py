"""The free and used capacity of all nodes as arrays: a pass over thousands of nodes stays short."""

from __future__ import annotations

import datetime
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith_controller.assignment.node_filters import Obstacle, find_obstacle
from tinsmith_controller.assignment.types import Node, PodRequest, Stage, Workload
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec import Rules
from tinsmith_jobs.status import Binding

Room = NDArray[np.float64]
"""Amounts by resource and node, [4, N]. Floats hold bytes exactly up to 8 PiB and do not wrap."""
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

CPU, MEMORY, GPUS, PODS = range(4)
_NUMBERS = {obstacle: number for number, obstacle in enumerate(Obstacle)}
_NO_OBSTACLE = -1
_LARGEST = 2**60
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def amounts(resources: Resources) -> tuple[int, int, int, int]:
    """Return the rows of `Room` for one pod or node."""
    return (
        _clip(resources.cpu_milli),
        _clip(resources.memory_bytes),
        _clip(resources.gpus),
        _clip(resources.pods),
    )


def seconds(time: datetime.datetime) -> float:
    """Return the seconds since 1970; a time without a zone is UTC."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    return (time - _EPOCH).total_seconds()


@dataclass(frozen=True, slots=True)
class Spread:
    """Room on some nodes: what one workload takes.

    Attributes:
        nodes: Indices [K] of nodes; a node may be there several times.
        amounts: What is taken there, [4, K].
    """

    nodes: Indices
    amounts: Room

    @classmethod
    def union(cls, spreads: Sequence[Spread]) -> Spread:
        """Return what several workloads take together."""
        if not spreads:
            return cls(np.zeros(0, dtype=np.int64), np.zeros((4, 0)))
        return cls(
            np.concatenate([spread.nodes for spread in spreads]),
            np.concatenate([spread.amounts for spread in spreads], axis=1),
        )

    def add_to(self, room: Room) -> None:
        """Give it back to `room`, in place."""
        for row, amounts_K in zip(room, self.amounts, strict=True):
            np.add.at(row, self.nodes, amounts_K)

    def take_from(self, room: Room) -> None:
        """Take it from `room`, in place."""
        for row, amounts_K in zip(room, self.amounts, strict=True):
            np.subtract.at(row, self.nodes, amounts_K)


class Cluster:
    """Nodes in the order of their names, and how much of them is taken.

    Attributes:
        nodes: The nodes; of several with one name, one.
        allocatable: What is there, [4, N].
        size: What is there for workloads, [4, N].
        free: What no pod takes.
        releasing: What workloads that give their nodes back still take.
        ending: What jobs take that do not leave yet, but will end some day. Pools do not end.
        youngest: When the last of those jobs came, in seconds, [N]; -inf where there is none.
    """

    def __init__(
        self, nodes: Iterable[Node], workloads: Sequence[Workload], now: datetime.datetime
    ) -> None:
        named: dict[str, Node] = {}
        for node in nodes:
            other = named.setdefault(node.name, node)
            if other is not node:  # the API has no two; whichever comes first would be chance
                named[node.name] = min(node, other, key=repr)
        self.nodes = [named[name] for name in sorted(named)]
        self._index = {node.name: i for i, node in enumerate(self.nodes)}
        rules = [each for w in workloads for each in (w.rules, *w.role_rules.values())]
        self._selector_keys = sorted({key for each in rules for key in each.node_selector})
        self._now_s = seconds(now)
        self.allocatable = _columns([amounts(node.allocatable) for node in self.nodes])
        self.size = self.allocatable - _columns([amounts(node.used) for node in self.nodes])
        self.free = self.size.copy()
        self.releasing = np.zeros_like(self.size)
        self.ending = np.zeros_like(self.size)
        self.youngest = np.full(len(self.nodes), -np.inf)
        self._masks: dict[Hashable, Mask] = {}
        self._levels: dict[str, tuple[Indices, int]] = {}
        self._kinds, self._kind_of = self._find_kinds()
        for workload in workloads:
            if workload.placed:
                self._seat(workload, workload.placed)

    def assign(self, workload: Workload, bindings: Sequence[Binding]) -> None:
        """Take room for new bindings of a workload."""
        self._seat(workload, bindings, since_s=self._now_s)

    def release(self, workload: Workload) -> None:
        """Note that a job that was holding is leaving now."""
        spread = self.spread(workload.placed)
        spread.add_to(self.releasing)
        spread.take_from(self.ending)

    def drained(self, workload: Workload) -> Room:
        """Return the room if all jobs were gone but this one."""
        room = self.free + self.releasing + self.ending
        if workload.placed and workload.is_gang and workload.stage is not Stage.RELEASING:
            self.spread(workload.placed).take_from(room)
        return room

    def spread(self, bindings: Iterable[Binding]) -> Spread:
        """Return what bindings take of the nodes that exist."""
        index = self._index
        known = [(index[p.node], amounts(p.resources)) for p in bindings if p.node in index]
        return Spread(
            np.array([i for i, _ in known], dtype=np.int64), _columns([taken for _, taken in known])
        )

    def obstacles(self, rules: Rules, *, has_gpus: bool) -> dict[Obstacle, Mask]:
        """Return the nodes that will not do by the reason why not, their room apart, [N]."""
        found = self._first_obstacles(rules, has_gpus=has_gpus)
        return {obstacle: found == number for obstacle, number in _NUMBERS.items()}

    def eligible(self, rules: Rules, *, has_gpus: bool) -> Mask:
        """Return which nodes will do, their room apart, [N]."""
        key = (rules_key(rules), has_gpus)
        if key not in self._masks:
            self._masks[key] = self._first_obstacles(rules, has_gpus=has_gpus) == _NO_OBSTACLE
        return self._masks[key]

    def level(self, label: str) -> tuple[Indices, int]:
        """Return the index of a label's value by node, [N], and how many values there are.

        Values are in alphabetic order; nodes without the label have the number of values as index.
        """
        if label not in self._levels:
            found = sorted({node.labels[label] for node in self.nodes if label in node.labels})
            codes = {value: i for i, value in enumerate(found)}
            by_node = [
                codes[node.labels[label]] if label in node.labels else len(found)
                for node in self.nodes
            ]
            self._levels[label] = (np.array(by_node, dtype=np.int64), len(found))
        return self._levels[label]

    def bindings(self, pods: Sequence[PodRequest], nodes: Sequence[int]) -> tuple[Binding, ...]:
        """Return the bindings of pods to nodes, one each."""
        return tuple(
            Binding(pod.role, pod.index, self.nodes[i].name, pod.resources)
            for pod, i in zip(pods, nodes, strict=True)
        )

    def _seat(
        self, workload: Workload, bindings: Iterable[Binding], since_s: float | None = None
    ) -> None:
        spread = self.spread(bindings)
        spread.take_from(self.free)
        if workload.stage is Stage.RELEASING:
            spread.add_to(self.releasing)
        elif workload.is_gang:
            spread.add_to(self.ending)
            if since_s is None:
                since_s = seconds(workload.assigned or workload.created)
            np.maximum.at(self.youngest, spread.nodes, since_s)

    def _first_obstacles(self, rules: Rules, *, has_gpus: bool) -> Indices:
        """Return the number of the first reason why each node will not do, [N]."""
        of_kinds = [find_obstacle(kind, rules, has_gpus=has_gpus) for kind in self._kinds]
        numbers = [_NO_OBSTACLE if each is None else _NUMBERS[each] for each in of_kinds]
        found: Indices = np.array(numbers, dtype=np.int64)[self._kind_of]
        for name in rules.avoided:
            i = self._index.get(name)
            if i is not None and found[i] == _NO_OBSTACLE:
                found[i] = _NUMBERS[Obstacle.AVOIDED]
        return found

    def _find_kinds(self) -> tuple[list[Node], Indices]:
        # Nodes that no rule can tell apart; thousands of nodes are a handful of kinds.
        kinds: dict[Hashable, int] = {}
        examples: list[Node] = []
        kind_of = np.zeros(len(self.nodes), dtype=np.int64)
        for i, node in enumerate(self.nodes):
            key = (
                node.is_ready,
                node.is_cordoned,
                node.taints,
                node.gpu_product,
                node.gpu_memory_gib,
                tuple(node.labels.get(label) for label in self._selector_keys),
            )
            kind_of[i] = kinds.setdefault(key, len(kinds))
            if len(examples) < len(kinds):
                examples.append(node)
        return examples, kind_of


def rules_key(rules: Rules) -> Hashable:
    """Return what makes equal rules equal; a map has no hash."""
    return (
        tuple(sorted(rules.node_selector.items())),
        rules.tolerations,
        rules.gpu_products,
        rules.min_gpu_memory_gib,
        rules.least_gpu_bytes,
        rules.required_level,
        rules.preferred_level,
        rules.avoided,
    )


def _columns(rows: Sequence[Sequence[int]]) -> Room:
    return np.array(rows, dtype=np.float64).reshape(len(rows), 4).T.copy()


def _clip(amount: int) -> int:
    return max(-_LARGEST, min(_LARGEST, amount))
