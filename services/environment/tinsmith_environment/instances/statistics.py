"""What the episodes of each job came to: counts, failures by cause, step times, rewards.

A bounded number of jobs is kept, of each project and in all; the one that was used least lately is
forgotten first. Step times are those of the last steps, so that percentiles say what is so now.
"""

from __future__ import annotations

import datetime
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

_NUM_TIMES = 2048
_MAX_ENTRIES = 1024
_MAX_ENTRIES_OF_PROJECT = 64


@dataclass(frozen=True, slots=True)
class StatisticsKey:
    """What is counted together."""

    project: str
    job: str
    """Empty for episodes without one."""
    environment: str


@dataclass(slots=True)
class JobStatistics:
    """What the episodes of one job in one environment came to."""

    start_time: datetime.datetime
    num_episodes: int = 0
    num_finished: int = 0
    num_abandoned: int = 0
    num_failures: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    sum_rewards: float = 0.0
    times_s: array[float] = field(default_factory=lambda: array("d"))

    def add_step(self, time_s: float) -> None:
        """Count a step."""
        if len(self.times_s) < _NUM_TIMES:
            self.times_s.append(time_s)
        else:
            self.times_s[self.num_steps % _NUM_TIMES] = time_s
        self.num_steps += 1

    def add_end(self, reward: float) -> None:
        """Count an episode that was played to its end.

        Args:
            reward: Sum of the rewards of its steps.
        """
        self.num_finished += 1
        self.sum_rewards += reward

    @property
    def mean_reward(self) -> float:
        """Mean over the finished episodes; 0 before the first."""
        return self.sum_rewards / self.num_finished if self.num_finished else 0.0

    def step_time_s(self, share: float) -> float:
        """Return what this share of the last steps took at most; 0 before the first."""
        if not self.times_s:
            return 0.0
        ordered = sorted(self.times_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Statistics:
    """The statistics of all projects."""

    def __init__(self, now: Callable[[], datetime.datetime]) -> None:
        self._now = now
        self._entries: OrderedDict[StatisticsKey, JobStatistics] = OrderedDict()
        self._num_entries: Counter[str] = Counter()

    def begin(self, key: StatisticsKey) -> JobStatistics:
        """Return what an episode that begins is counted in."""
        entry = self._entries.get(key)
        if entry is None:
            self._make_room(key.project)
            entry = self._entries[key] = JobStatistics(self._now())
            self._num_entries[key.project] += 1
        self._entries.move_to_end(key)
        return entry

    def of(self, project: str, job: str = "") -> list[tuple[StatisticsKey, JobStatistics]]:
        """Return what is kept of a project, or of one job of it, by job and environment."""
        found = [
            (key, entry)
            for key, entry in self._entries.items()
            if key.project == project and job in ("", key.job)
        ]
        return sorted(found, key=lambda pair: (pair[0].job, pair[0].environment))

    def reset(self, project: str, job: str = "") -> None:
        """Forget what is kept of a project, or of one job of it."""
        for key, _ in self.of(project, job):
            self._forget(key)

    def _make_room(self, project: str) -> None:
        if self._num_entries[project] >= _MAX_ENTRIES_OF_PROJECT:
            self._forget(next(key for key in self._entries if key.project == project))
        elif len(self._entries) >= _MAX_ENTRIES:
            self._forget(next(iter(self._entries)))

    def _forget(self, key: StatisticsKey) -> None:
        del self._entries[key]
        self._num_entries[key.project] -= 1
        if not self._num_entries[key.project]:
            del self._num_entries[key.project]
