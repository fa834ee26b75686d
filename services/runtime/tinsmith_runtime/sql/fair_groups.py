"""Writes that wait for a database, shared out by project into groups of bounded time.

A group is one transaction, and all of it waits for its end. Were a group everything that waits, one
project with a hundred writes would make each write of another last as long as its hundred. So a
group holds about as many writes as take `_GROUP_S`, measured on the groups before. Where the commit
takes longer, it holds as many as take that long: waiting for disks never costs more than half. The
projects take turns in it: the next write is one of the project that had the least so far.

The order is start-time fair queueing: a project that was idle begins where the others are, and
saves nothing up. Work of no project goes first: it ends what was accepted before. Source of the
order: Goyal, Vin, Cheng 1996, "Start-time Fair Queuing".
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from tinsmith_runtime.observability.metrics import LEDGER_WAITING_WRITES

WriteT = TypeVar("WriteT")

_GROUP_S = 0.02
_MIN_GROUP, _MAX_GROUP = 16, 256
_SMOOTHING = 0.2


class FairGroups(Generic[WriteT]):
    """What waits, in the order in which it is written; not safe for threads."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Sequence[WriteT]]] = {}
        # The projects that wait, by what they had so far; of equals the first to come.
        self._turns: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._had = 0.0
        self._write_s = 0.0
        self._commit_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, project: str, writes: Sequence[WriteT]) -> None:
        """Queue writes that are to share a transaction.

        Args:
            project: Whose they are; empty for work of no project.
            writes: At least one.
        """
        LEDGER_WAITING_WRITES.inc(len(writes))
        if project in self._waiting:
            self._waiting[project].append(writes)
            return
        self._waiting[project] = deque([writes])
        if project:
            heapq.heappush(self._turns, (self._had, next(self._numbers), project))

    def take(self) -> list[WriteT]:
        """Return the next group; empty if nothing waits."""
        limit = self._limit()
        group: list[WriteT] = []
        while self._waiting and len(group) < limit:
            if "" in self._waiting:
                group += self._pop("")
                continue
            self._had, _, project = heapq.heappop(self._turns)
            writes = self._pop(project)
            group += writes
            if project in self._waiting:
                turn = (self._had + len(writes), next(self._numbers), project)
                heapq.heappush(self._turns, turn)
        LEDGER_WAITING_WRITES.dec(len(group))
        return group

    def note(self, num_writes: int, *, writes_s: float, commit_s: float) -> None:
        """Learn from a group.

        Args:
            num_writes: How many it had.
            writes_s: What their statements took.
            commit_s: What the commit took.
        """
        share = _SMOOTHING if self._write_s else 1.0
        self._write_s += share * (writes_s / num_writes - self._write_s)
        self._commit_s += share * (commit_s - self._commit_s)

    def _limit(self) -> int:
        if not self._write_s:
            return _MAX_GROUP
        num_writes = int(max(_GROUP_S, self._commit_s) / self._write_s)
        return max(_MIN_GROUP, min(_MAX_GROUP, num_writes))

    def _pop(self, project: str) -> Sequence[WriteT]:
        queue = self._waiting[project]
        writes = queue.popleft()
        if not queue:
            del self._waiting[project]
        return writes
