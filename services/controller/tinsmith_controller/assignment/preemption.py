"""Preemption: chooses the workloads that give way to one of higher priority.

The victims hold few GPUs, have low priority and were assigned late. The choice is a heuristic: the
number of all sets of victims is too large.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence

from tinsmith_controller.assignment.capacity import seconds
from tinsmith_controller.assignment.types import Stage, Workload

Suffices = Callable[[Sequence[Workload]], bool]


def may_be_preempted(workload: Workload, now: datetime.datetime) -> bool:
    """Whether the workload can be asked to give way at all.

    What was assigned at this very moment cannot: a second look at the same state changes nothing.
    """
    return (
        workload.is_preemptible
        and workload.stage is Stage.HOLDING
        and bool(workload.placed)
        and _assigned_s(workload) < seconds(now)
    )


def choose_victims(
    proposals: Iterable[Sequence[Workload]], suffices: Suffices
) -> tuple[Workload, ...]:
    """Return the workloads that have to go, by key; empty if nothing helps.

    Which of all sets loses the fewest GPUs is too many sets to ask. Each proposal is an order in
    which to give workloads up: of its shortest beginning that suffices, those that are not needed
    are spared, and the best of what is left wins.

    Args:
        proposals: Orders of workloads that may go.
        suffices: Whether it is enough that these go. If some suffice, more do.
    """
    found = [
        _prune(proposal[: _shortest(proposal, suffices)], suffices)
        for proposal in proposals
        if suffices(proposal)
    ]
    return tuple(sorted(min(found, key=_loss), key=lambda w: w.key)) if found else ()


def cheapest_first(workloads: Iterable[Workload]) -> list[Workload]:
    """Return the order: lowest priority, then youngest assignment."""
    return sorted(workloads, key=lambda w: (w.priority, -_assigned_s(w), w.key))


def smallest_first(workloads: Iterable[Workload]) -> list[Workload]:
    """Return the order: fewest GPUs, then as `cheapest_first`."""
    return sorted(cheapest_first(workloads), key=lambda w: w.num_gpus_held)


def _shortest(proposal: Sequence[Workload], suffices: Suffices) -> int:
    too_few, enough = 0, len(proposal)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if suffices(proposal[:middle]):
            enough = middle
        else:
            too_few = middle
    return enough


def _prune(victims: Sequence[Workload], suffices: Suffices) -> list[Workload]:
    dearest_first = sorted(
        victims, key=lambda w: (w.num_gpus_held, w.priority, -_assigned_s(w), w.key), reverse=True
    )
    needed = list(dearest_first)
    for victim in dearest_first:
        others = [other for other in needed if other is not victim]
        if suffices(others):
            needed = others
    return needed


def _loss(victims: Iterable[Workload]) -> tuple[int, list[int], float, list[str]]:
    """Fewest GPUs, then lowest priorities, then youngest assignments."""
    victims = list(victims)
    return (
        sum(victim.num_gpus_held for victim in victims),
        sorted((victim.priority for victim in victims), reverse=True),
        -sum(_assigned_s(victim) for victim in victims),
        sorted(str(victim.key) for victim in victims),
    )


def _assigned_s(workload: Workload) -> float:
    return seconds(workload.assigned or workload.created)
