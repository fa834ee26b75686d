"""The order in which workloads are placed: by tier, then by the fair share of projects."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tinsmith_controller.assignment.capacity import seconds
from tinsmith_controller.assignment.types import QueueConfig, Stage, Workload
from tinsmith_jobs.naming import NamespacedName

Tier = tuple[bool, int]
Rank = tuple[int, float, NamespacedName]
_LARGEST = 2**60  # more cannot be divided by a float
_Entry = tuple[float, float, NamespacedName, Workload]


def tier(workload: Workload) -> Tier:
    """Return what fairness never overrules; lower goes first.

    A job that lost a pod goes first: until it has another, all that it holds is idle.
    The missing replicas of a pool are no such loss, and wait by the pool's priority.
    """
    is_replacement = workload.is_gang and workload.stage is Stage.HOLDING
    return (not is_replacement, -workload.priority)


def rank(workload: Workload) -> Rank:
    """Return the place of a workload within its project; lower goes first."""
    return (-workload.priority, seconds(workload.queued), workload.key)


class WorkloadOrder:
    """Workloads that want nodes: by tier, then by their project's share, then by their waiting.

    The share of a project is the GPUs that it has by its weight. Pools belong to no project and
    have no share.

    Args:
        workloads: All workloads; those that hold nodes count, those that want some are ordered.
        policy: The weights.
    """

    def __init__(self, workloads: Sequence[Workload], policy: QueueConfig) -> None:
        self._policy = policy
        self._held: dict[str, int] = defaultdict(int)
        queues: dict[Tier, dict[str, list[Workload]]] = defaultdict(lambda: defaultdict(list))
        for workload in workloads:
            self._held[workload.project] += workload.num_gpus_held
            if workload.pods and workload.stage is not Stage.RELEASING:
                queues[tier(workload)][workload.project].append(workload)
        self._tiers = [queues[each] for each in sorted(queues, reverse=True)]
        self._queues: dict[str, list[Workload]] = {}
        self._heads: list[_Entry] = []
        self._last: Workload | None = None

    def peers(self) -> list[Workload]:
        """Return those of the present tier that are still to come, as they would by now."""
        left = [entry[-1] for entry in self._heads]
        left += itertools.chain.from_iterable(self._queues.values())
        left += [self._last] if self._last else []
        return sorted(left, key=lambda w: (self._share(w), seconds(w.queued), w.key))

    def gave(self, workload: Workload, num_gpus: int) -> None:
        """Count GPUs that the workload got in this pass."""
        self._held[workload.project] += num_gpus

    def next(self) -> Workload | None:
        """Return the workload that is placed next, or None after the last."""
        if self._last is not None:
            # Only now: what the last one got counts against the next of its project.
            self._push_head(self._last.project)
            self._last = None
        while not self._heads:
            if not self._tiers:
                return None
            self._start(self._tiers.pop())
        *_, self._last = heapq.heappop(self._heads)
        return self._last

    def _start(self, queues: dict[str, list[Workload]]) -> None:
        self._queues = {
            project: sorted(queue, key=rank, reverse=True) for project, queue in queues.items()
        }
        self._heads = []
        for project in self._queues:
            self._push_head(project)

    def _push_head(self, project: str) -> None:
        queue = self._queues[project]
        if queue:
            head = queue.pop()
            heapq.heappush(self._heads, (self._share(head), seconds(head.queued), head.key, head))

    def _share(self, workload: Workload) -> float:
        project = workload.project
        if not project:
            return 0.0
        share = self._policy.projects.get(project)
        weight = 1.0 if share is None else share.weight
        num_gpus = min(self._held[project], _LARGEST)
        return num_gpus / weight if weight > 0 else float("inf")


def unique(workloads: Iterable[Workload]) -> list[Workload]:
    """Return the workloads by key; of several with one, one."""
    found: dict[NamespacedName, Workload] = {}
    for workload in workloads:
        other = found.setdefault(workload.key, workload)
        if other is not workload:  # the API has no two; whichever comes first would be chance
            found[workload.key] = min(workload, other, key=repr)
    return [found[key] for key in sorted(found)]
