"""Which episodes of a batch are played, when a group is complete, and when enough is: no effects.

A driver begins what `begin` returns and reports how each play ended; `run_groups` is one, the
coordinator another. A play that failed for infrastructure is repeated a bounded number of times and
then leaves its group. Over-sampling begins more plays than a group needs: the first complete ones
are taken and the rest given up. Tasks beyond the groups that are wanted are spares, which take the
place of groups that were dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """How many episodes are played, and how failures are met."""

    group_size: int = 8
    """Episodes of one task."""
    max_concurrency: int = 64
    """Episodes that run at once."""
    max_replacements: int = 2
    """Times that one episode is played again after an infrastructure failure."""
    min_group_size: int = 2
    """Groups with fewer episodes are dropped: there is nothing to compare with."""
    num_groups: int = 0
    """Groups that are wanted; further tasks are spares. 0 wants one for each task."""
    over_sampling_factor: float = 1.0
    """Episodes of a group, and groups if there are spares, that are begun for each one wanted."""

    def __post_init__(self) -> None:
        for name in ("group_size", "max_concurrency", "min_group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_replacements", "num_groups"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.min_group_size > self.group_size:
            raise ValueError("min_group_size must not be above group_size")
        if not 1.0 <= self.over_sampling_factor <= 16.0:
            raise ValueError(f"over_sampling_factor must be 1 to 16: {self.over_sampling_factor}")

    @property
    def num_begun_members(self) -> int:
        """Episodes of one group that are begun."""
        return math.ceil(self.group_size * self.over_sampling_factor)


@dataclass(frozen=True, slots=True, order=True)
class Play:
    """One play of an episode: which task, which member of its group, and which attempt."""

    task: int
    member: int
    attempt: int = 0

    def key(self, batch_key: str) -> str:
        """Return what tells the random draws of this play from those of others."""
        return f"{batch_key}/{self.task}/{self.member}/{self.attempt}"


@dataclass(slots=True)
class _Group:
    waiting: set[int] = field(default_factory=set)
    """Members that are still to be played, or are being played."""
    finished: list[int] = field(default_factory=list)
    is_settled: bool = False


class GroupPlan:
    """The plan of one batch, changed by `begin`, `finish` and `fail` alone.

    Args:
        num_tasks: Tasks that there are.
        config: Sizes and limits.

    Raises:
        ValueError: If more groups are wanted than there are tasks.
    """

    def __init__(self, num_tasks: int, config: GroupConfig) -> None:
        self._config = config
        self.num_wanted = config.num_groups or num_tasks
        if self.num_wanted > num_tasks:
            raise ValueError(f"num_groups is {config.num_groups}, and there are {num_tasks} tasks")
        self._groups: dict[int, _Group] = {}
        self._spares = deque(range(num_tasks))
        self._queue: deque[Play] = deque()
        self._running: set[Play] = set()
        self._taken: dict[int, tuple[int, ...]] = {}
        self.num_begun = 0
        """Plays that were begun."""
        self.num_replaced = 0
        """Plays that failed and were played again."""
        self.num_lost = 0
        """Episodes that failed until no replacement was left."""
        self.num_dropped_groups = 0
        self.num_dropped_episodes = 0
        """Good episodes of dropped groups."""
        num_open = math.ceil(self.num_wanted * config.over_sampling_factor)
        for _ in range(min(num_open, num_tasks)):
            self._open_group()

    @property
    def is_done(self) -> bool:
        """Whether enough groups are complete, or no more can be."""
        is_enough = len(self._taken) >= self.num_wanted
        return is_enough or not (self._queue or self._running)

    @property
    def taken(self) -> dict[int, tuple[int, ...]]:
        """The members of each complete group, by task, both in order."""
        return {task: self._taken[task] for task in sorted(self._taken)}

    @property
    def running(self) -> frozenset[Play]:
        """Plays that were begun and have not ended."""
        return frozenset(self._running)

    def begin(self) -> list[Play]:
        """Return the plays that are to be begun now."""
        begun: list[Play] = []
        while self._queue and not self.is_done:
            if len(self._running) >= self._config.max_concurrency:
                break
            play = self._queue.popleft()
            self._running.add(play)
            begun.append(play)
        self.num_begun += len(begun)
        return begun

    def finish(self, play: Play) -> frozenset[Play]:
        """Note that an episode was played to its end; return the plays to give up.

        Raises:
            ValueError: If the play does not run.
        """
        group = self._end(play)
        group.waiting.discard(play.member)
        group.finished.append(play.member)
        if len(group.finished) < self._config.group_size and group.waiting:
            return frozenset()
        self._settle(play.task, group)
        return self._given_up()

    def fail(self, play: Play, *, may_repeat: bool = True) -> frozenset[Play]:
        """Note that a play failed; return the plays to give up.

        Args:
            play: Which one.
            may_repeat: Whether another play could end otherwise.

        Raises:
            ValueError: If the play does not run.
        """
        group = self._end(play)
        if may_repeat and play.attempt < self._config.max_replacements:
            self.num_replaced += 1
            self._queue.append(Play(play.task, play.member, play.attempt + 1))
            return frozenset()
        self.num_lost += 1
        group.waiting.discard(play.member)
        if not group.waiting:
            self._settle(play.task, group)
        return frozenset()

    def resume(self, ended: Iterable[tuple[Play, bool, bool]]) -> None:
        """Bring a new plan to where an earlier one was.

        Args:
            ended: Plays in the order of their ends: whether each finished, and whether it might be
                repeated.
        """
        for play, has_finished, may_repeat in ended:
            if play in self._queue:
                self._queue.remove(play)
                self._running.add(play)
                self.num_begun += 1
            if has_finished:
                self.finish(play)
            else:
                self.fail(play, may_repeat=may_repeat)

    def _open_group(self) -> None:
        task = self._spares.popleft()
        members = range(self._config.num_begun_members)
        self._groups[task] = _Group(set(members))
        self._queue.extend(Play(task, member) for member in members)

    def _end(self, play: Play) -> _Group:
        if play not in self._running:
            raise ValueError(f"{play} does not run")
        self._running.discard(play)
        return self._groups[play.task]

    def _settle(self, task: int, group: _Group) -> None:
        """Take a group that has all it will have, or drop it and open a spare one."""
        group.is_settled = True
        if len(group.finished) >= self._config.min_group_size:
            self._taken[task] = tuple(sorted(group.finished))
            return
        self.num_dropped_groups += 1
        self.num_dropped_episodes += len(group.finished)
        if self._spares:
            self._open_group()

    def _given_up(self) -> frozenset[Play]:
        """Forget plays that are of no use any more; return those of them that run."""
        is_enough = len(self._taken) >= self.num_wanted

        def is_useless(play: Play) -> bool:
            return is_enough or self._groups[play.task].is_settled

        self._queue = deque(play for play in self._queue if not is_useless(play))
        given_up = frozenset(play for play in self._running if is_useless(play))
        self._running -= given_up
        return given_up
