"""Gang assignment: the pods of one workload onto nodes, all or none.

Equal pods are placed together, first on nodes whose GPUs they use up. An unused node is broken into
last. For equal pods this finds an assignment whenever there is one. Pods that differ are packed
largest first; where they may not use the same nodes and that fails, those with the fewest nodes
first. Both may miss one: the exact answer is NP-hard.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tinsmith_controller.assignment.capacity import (
    CPU,
    GPUS,
    PODS,
    Cluster,
    Indices,
    Mask,
    Room,
    amounts,
    rules_key,
)
from tinsmith_controller.assignment.types import PodRequest, Workload
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec import Rules


@dataclass(frozen=True, slots=True)
class Group:
    """Equal pods of a gang.

    Attributes:
        amounts: What one asks for, [4].
        members: Which pods they are, as indices of the gang's.
        eligible: Nodes that will do, [N].
        rules: Which nodes those are.
        role: The role whose template they are of; empty if the rules are those of all pods.
    """

    amounts: NDArray[np.float64]
    members: tuple[int, ...]
    eligible: Mask
    rules: Rules
    role: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """A label that pods should share, or have to.

    Attributes:
        values: Index of its value by node, [N]; `num_values` on nodes without it.
        num_values: How many values there are.
        taken: Those that the workload is on already.
    """

    values: Indices
    num_values: int
    taken: frozenset[int]


@dataclass(frozen=True, slots=True)
class Gang:
    """Pods that are placed all or none.

    Attributes:
        signature: Equal for gangs that fit in the same places.
        pods: The pods.
        groups: The same, equal ones together, largest first.
        size: The cluster's, [4, N]: tells which nodes are unused.
        required: The level that has to be shared.
        preferred: The level that should be.
    """

    signature: Hashable
    pods: tuple[PodRequest, ...]
    groups: tuple[Group, ...]
    size: Room
    required: Level | None
    preferred: Level | None


def prepare(cluster: Cluster, workload: Workload, pods: Sequence[PodRequest]) -> Gang:
    """Return pods of a workload as a gang."""
    members: dict[tuple[Resources, str], list[int]] = {}
    for i, pod in enumerate(pods):
        role = pod.role if pod.role in workload.role_rules else ""
        members.setdefault((pod.resources, role), []).append(i)
    rules = workload.rules
    order = sorted(members, key=_largest_first)
    groups = tuple(
        Group(
            np.maximum(np.array(amounts(resources), dtype=np.float64), 0),
            tuple(members[resources, role]),
            cluster.eligible(workload.rules_of(role), has_gpus=resources.gpus > 0),
            workload.rules_of(role),
            role,
        )
        for resources, role in order
    )
    required = _level(cluster, workload, rules.required_level)
    preferred = _level(cluster, workload, rules.preferred_level)
    return Gang(
        signature=(
            rules_key(rules),
            tuple(
                (resources, role, role and rules_key(workload.rules_of(role)), len(members[key]))
                for key in order
                for resources, role in [key]
            ),
            required and required.taken,
            preferred and preferred.taken,
        ),
        pods=tuple(pods),
        groups=groups,
        size=cluster.size,
        required=required,
        preferred=preferred,
    )


def _largest_first(group: tuple[Resources, str]) -> tuple[int, int, int, int, str]:
    resources, role = group
    return (
        -resources.gpus,
        -resources.memory_bytes,
        -resources.cpu_milli,
        -resources.pods,
        role,
    )


def place(gang: Gang, room: Room, among: Indices | None = None) -> list[int] | None:
    """Return the node of each pod, or None if there is no place for all of them.

    Args:
        gang: The pods.
        room: What they may take, [4, N]. Is not changed.
        among: The only nodes that may be used; all if None.
    """
    found = _place_in_order(gang, room, among)
    if found is not None or not any(group.role for group in gang.groups):
        return found
    scarce_first = sorted(gang.groups, key=lambda group: int(group.eligible.sum()))
    return _place_in_order(replace(gang, groups=tuple(scarce_first)), room, among)


def _place_in_order(gang: Gang, room: Room, among: Indices | None) -> list[int] | None:
    nodes = _usable(gang, room, among)
    if gang.required is None:
        return _place_close(gang, room, nodes)
    return next(
        (
            spots
            for value in _values_with_room(gang, room, nodes, gang.required)
            if (spots := _place_close(gang, room, nodes[gang.required.values[nodes] == value]))
            is not None
        ),
        None,
    )


def place_soonest(gang: Gang, room: Room, ranking: Indices) -> list[int] | None:
    """Return places on the shortest beginning of a ranking of nodes on which there are any."""
    if place(gang, room, ranking) is None:
        return None
    too_short, enough = 0, len(ranking)
    while enough - too_short > 1:
        middle = (too_short + enough) // 2
        if place(gang, room, ranking[:middle]) is None:
            too_short = middle
        else:
            enough = middle
    return place(gang, room, ranking[:enough])


def _level(cluster: Cluster, workload: Workload, label: str) -> Level | None:
    if not label:
        return None
    values, num_values = cluster.level(label)
    on = values[cluster.spread(workload.placed).nodes]
    return Level(values, num_values, frozenset(int(value) for value in on if value < num_values))


def _usable(gang: Gang, room: Room, among: Indices | None) -> Indices:
    usable: Mask = room[PODS] >= min(group.amounts[PODS] for group in gang.groups)
    least_gpus = min(group.amounts[GPUS] for group in gang.groups)
    if least_gpus > 0:
        usable &= room[GPUS] >= least_gpus
    usable &= np.logical_or.reduce([group.eligible for group in gang.groups])
    return np.flatnonzero(usable) if among is None else np.sort(among[usable[among]])


def _values_with_room(gang: Gang, room: Room, nodes: Indices, level: Level) -> list[int]:
    """Return the values where the gang may fit, those with the least room first."""
    if len(level.taken) > 1:
        return []
    filling = _Filling(gang, room, nodes)
    has_room, free = filling.room_by_value(level)
    return [
        int(value)
        for value in np.lexsort((np.arange(level.num_values), free[: level.num_values]))
        if has_room[value] and (not level.taken or value in level.taken)
    ]


def _place_close(gang: Gang, room: Room, nodes: Indices) -> list[int] | None:
    filling = _Filling(gang, room, nodes)
    if not filling.may_fit():
        return None
    if gang.preferred is not None:
        filling.pour_by_value(gang.preferred)
        if filling.is_done:
            return filling.spots()
        filling = _Filling(gang, room, nodes)  # a preference never costs the place
    filling.pour()
    return filling.spots() if filling.is_done else None


class _Filling:
    """A gang that is being placed on some nodes.

    Args:
        gang: The pods.
        room: What they may take, [4, N]. Is not changed.
        nodes: Indices [K] of the nodes.
    """

    def __init__(self, gang: Gang, room: Room, nodes: Indices) -> None:
        self._gang = gang
        self._nodes = nodes
        self._room = room[:, nodes]
        self._left = [len(group.members) for group in gang.groups]
        self._spots: list[list[int]] = [[] for _ in gang.groups]
        self._scarce = GPUS if gang.groups[0].amounts[GPUS] > 0 else CPU

    @property
    def is_done(self) -> bool:
        return not any(self._left)

    def spots(self) -> list[int]:
        """Return the node of each pod."""
        node_of = [0] * len(self._gang.pods)
        for group, spots in zip(self._gang.groups, self._spots, strict=True):
            for member, node in zip(group.members, spots, strict=True):
                node_of[member] = node
        return node_of

    def may_fit(self) -> bool:
        """Whether each group would fit if it were alone."""
        return all(self._capacity(g).sum() >= left for g, left in enumerate(self._left))

    def room_by_value(self, level: Level) -> tuple[Mask, NDArray[np.float64]]:
        """Return by value whether all that is left may fit there, and how much is free."""
        values = level.values[self._nodes]
        size = level.num_values + 1
        has_room = np.ones(size, dtype=np.bool_)
        for g, left in enumerate(self._left):
            if left:
                has_room &= np.bincount(values, self._capacity(g), size) >= left
        return has_room, np.bincount(values, self._room[self._scarce], size).astype(np.float64)

    def pour_by_value(self, level: Level) -> None:
        """Place as much as fits, on as few values as possible."""
        values = level.values[self._nodes]
        for value in sorted(level.taken):
            self.pour(values == value)
        while not self.is_done:
            has_room, free = self.room_by_value(level)
            if has_room.any():
                value = int(np.argmin(np.where(has_room, free, np.inf)))
            else:
                value = self._most_useful(values, level.num_values + 1)
            before = sum(self._left)
            self.pour(values == value)
            if sum(self._left) == before:
                return

    def pour(self, allowed: Mask | None = None) -> None:
        """Place as much as fits on the allowed nodes."""
        for g, group in enumerate(self._gang.groups):
            capacity = self._capacity(g)
            if allowed is not None:
                capacity = np.where(allowed, capacity, 0)
            while self._left[g]:
                taken = np.minimum(capacity, self._left[g])
                order = self._best_first(group, taken)
                if not len(order):
                    break
                for i in order:
                    num = int(taken[i])
                    if num > self._left[g]:
                        break  # what fits best has changed, now that so few are left
                    self._room[:, i] -= num * group.amounts
                    self._spots[g] += [int(self._nodes[i])] * num
                    self._left[g] -= num
                    capacity[i] = 0

    def _capacity(self, g: int) -> NDArray[np.float64]:
        group = self._gang.groups[g]
        capacity = np.where(group.eligible[self._nodes], float(self._left[g]), 0.0)
        for row, amount in zip(self._room, group.amounts, strict=True):
            if amount > 0:
                capacity = np.minimum(capacity, np.floor(row / amount))
        return np.maximum(capacity, 0.0)

    def _best_first(self, group: Group, taken: NDArray[np.float64]) -> Indices:
        candidates = np.flatnonzero(taken)
        nodes, taken = self._nodes[candidates], taken[candidates]
        size_gpus = self._gang.size[GPUS, nodes]
        free_gpus = self._room[GPUS, candidates]
        if group.amounts[GPUS] > 0:
            left_over = free_gpus - taken * group.amounts[GPUS]
            is_waste = (free_gpus >= size_gpus) & (left_over > 0)
        else:
            left_over = self._room[CPU, candidates] - taken * group.amounts[CPU]
            is_waste = size_gpus > 0
        return candidates[np.lexsort((nodes, -taken, left_over, is_waste))]

    def _most_useful(self, values: Indices, size: int) -> int:
        score = np.zeros(size)
        for g, group in enumerate(self._gang.groups):
            fitting = np.minimum(np.bincount(values, self._capacity(g), size), self._left[g])
            score += fitting * max(1.0, group.amounts[self._scarce])
        return int(np.argmax(score))
