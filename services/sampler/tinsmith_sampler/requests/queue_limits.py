"""How many sequences may be unfinished: of a project, and of all.

A project that floods meets its own limit first. Several of them may fill the pod. A project that
has less than an equal part of it is accepted nevertheless: no queue of others refuses a small one.
"""

from __future__ import annotations

from collections import Counter

from tinsmith_runtime.errors import QueueFullError

_RETRY_S = 0.5


class QueueLimits:
    """The unfinished sequences of one sampler.

    Args:
        max_sequences: Of all projects together; passed only by projects below an equal part.
        max_project_sequences: Of one project.
    """

    def __init__(self, max_sequences: int, max_project_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._max_project_sequences = min(max_project_sequences, max_sequences)
        self._counts: Counter[str] = Counter()

    def enter(self, project: str, count: int) -> None:
        """Count sequences that are about to wait.

        Raises:
            QueueFullError: If they would be too many; nothing was counted.
        """
        of_project, total = self._counts[project] + count, self._counts.total() + count
        if of_project > self._max_project_sequences:
            raise QueueFullError(
                f"{of_project - count} sequences of the project wait, at most "
                f"{self._max_project_sequences} may; retry when some have finished",
                retry_after_s=_RETRY_S,
                limit=self._max_project_sequences,
            )
        if total > self._max_sequences and of_project > self._part(project):
            raise QueueFullError(
                f"{total - count} sequences of all projects wait; retry when some have finished",
                retry_after_s=_RETRY_S,
                limit=self._max_sequences,
            )
        self._counts[project] += count

    def leave(self, project: str, count: int) -> None:
        """Count sequences that wait no longer."""
        self._counts[project] -= count
        if not self._counts[project]:
            del self._counts[project]

    def _part(self, project: str) -> int:
        """Return an equal part of the whole, for a project among those that hold something."""
        return self._max_sequences // len({project, *self._counts})
