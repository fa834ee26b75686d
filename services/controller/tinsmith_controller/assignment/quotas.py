"""Quotas: the GPUs that queues and projects hold, and may hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tinsmith_controller.assignment.types import QueueConfig, Workload
from tinsmith_jobs.naming import NamespacedName

_Scope = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Excess:
    """A queue or project that may not hold what is asked for.

    Attributes:
        what: `queue` or `project`.
        name: Its name.
        num_held: GPUs that it holds.
        max_gpus: GPUs that it may hold.
        num_wanted: GPUs that are asked for.
        is_own: Whether that is too much even when no other workload holds any.
        behind: The workload that waits for the rest; None if the rest would not do.
    """

    what: str
    name: str
    num_held: int
    max_gpus: int
    num_wanted: int
    is_own: bool
    behind: NamespacedName | None = None


class Quotas:
    """GPUs held, and kept for those who have waited too long, by queue and project.

    Args:
        policy: The limits.
        workloads: All workloads; those that are leaving still hold what they have.
    """

    def __init__(self, policy: QueueConfig, workloads: Sequence[Workload]) -> None:
        self._policy = policy
        self._held: dict[_Scope, int] = defaultdict(int)
        self._kept: dict[_Scope, tuple[int, NamespacedName]] = {}
        for workload in workloads:
            self.take(workload, workload.num_gpus_held)

    def has_queue(self, workload: Workload) -> bool:
        """Whether the workload's queue exists; without any in the policy all do."""
        return not self._policy.queues or workload.queue in self._policy.queues

    def take(self, workload: Workload, num_gpus: int) -> None:
        """Count GPUs that the workload got."""
        for scope in _scopes(workload):
            self._held[scope] += num_gpus

    def keep(self, workload: Workload, num_gpus: int) -> None:
        """Keep GPUs of the scopes that are in the way of the workload from those behind it."""
        for scope, limit in self._limits(workload):
            if scope not in self._kept and self._held[scope] + num_gpus > limit:
                self._kept[scope] = (num_gpus, workload.key)

    def excess(
        self, workload: Workload, num_gpus: int, without: Iterable[Workload] = ()
    ) -> Excess | None:
        """Return what is in the way of so many GPUs more, or None.

        Args:
            workload: The workload that wants them.
            num_gpus: How many.
            without: Workloads to count as gone.
        """
        if not num_gpus:
            return None
        limits = list(self._limits(workload))
        if not limits:
            return None
        gone: dict[_Scope, int] = defaultdict(int)
        for other in without:
            for scope in _scopes(other):
                gone[scope] += other.num_gpus_held
        found = None
        for scope, limit in limits:
            held = self._held[scope] - gone[scope]
            kept, keeper = self._kept.get(scope, (0, None))
            if held + kept + num_gpus <= limit:
                continue
            is_own = workload.num_gpus_held + num_gpus > limit
            behind = keeper if held + num_gpus <= limit else None
            excess = Excess(*scope, held, limit, num_gpus, is_own, behind)
            if is_own:  # nothing that others do helps: that is what has to be said
                return excess
            found = found or excess
        return found

    def _limits(self, workload: Workload) -> Iterator[tuple[_Scope, int]]:
        for scope in _scopes(workload):
            shares = self._policy.queues if scope[0] == "queue" else self._policy.projects
            share = shares.get(scope[1])
            if share is not None and share.max_gpus is not None:
                yield scope, share.max_gpus


def _scopes(workload: Workload) -> list[_Scope]:
    queue = ("queue", workload.queue)
    return [queue, ("project", workload.project)] if workload.project else [queue]
