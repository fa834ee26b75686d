"""Deficit round robin: what of the waiting work of all runs goes into the next cycle.

The clock of the scheduler is the cycle: one packed pass over about `cycle_tokens` tokens. Each
cycle shares its tokens out. Projects that have work get equal parts. The runs of a project that
have work share its part equally, so that a hundred runs get no more than one. What a run has
no use for goes to the others. A run pays for its operations with what it got, in order, and keeps
what is left while its next operation costs more. An operation larger than its share is saved up
for, over several cycles, and never starves. Where the cycle still has room, a large operation may
be had in advance, and is paid back from the next shares. A run that has nothing left to compute
keeps and owes nothing.

Two rules bound the wait, which plain round robin leaves to chance:

* Runs whose next operation is within their share are served first in every cycle. What was saved up
  for goes into the room behind them, the run served longest ago first, and at least one.
* An operation larger than a whole cycle, or one that must not share a cycle, gets a cycle alone.
  There are never two of those in a row while other work is ready. An operation itself is not cut.

So, with `s` the share of a run, `cycle_tokens / projects / runs of the project`, and `b` the number
of runs whose next operation exceeds theirs:

* An operation of at most `s` tokens is in the next cycle, or in the one after it.
* One of `c > s` tokens is begun after at most `2 * (ceil(c / s) + b)` cycles.
* Both count from when the run has paid back what it had in advance, less than one operation.
* A run that always has work within its share gets its share of every cycle that is not alone.
* A cycle holds at most `4 * cycle_tokens` tokens, and about `cycle_tokens` in the mean, or it
  holds one operation.

A run whose last cycle is still being committed cannot be in the next one. It gets its share of it
nevertheless, to be used in the one after. Cycles overlap, and a project with many runs would else
have the cycles of the others for itself.

Nothing here waits or computes; the tests run it on numbers alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAX_SAVED_ROUNDS = 2
"""What a run may have beyond its next part: its share of the last cycle and of this one."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The work of a run.

    Attributes:
        run: Its name.
        project: The tenant that it belongs to.
        costs: What may go into one cycle, in order: the tokens of each part that is not cut.
        is_alone: Whether the first part must not share its cycle with another run.
        is_ready: Whether it can be computed now, or follows something that is being committed.
    """

    run: str
    project: str
    costs: Sequence[int]
    is_alone: bool = False
    is_ready: bool = True


@dataclass(frozen=True, slots=True)
class CycleShare:
    """What goes into a cycle: how many parts of the backlog of each run."""

    num_parts: Mapping[str, int]
    is_alone: bool = False


@dataclass(slots=True)
class _Flow:
    """A run during the making of one cycle.

    Attributes:
        share: The part of a cycle that it can count on.
        allotment: What it gets of this one: more if others have little to do, less if it has.
    """

    backlog: Backlog
    share: int
    allotment: int
    credit: int
    cycle_tokens: int
    num_taken: int = 0

    @property
    def cost(self) -> int:
        """What its next part costs."""
        return self.backlog.costs[self.num_taken]

    @property
    def has_work(self) -> bool:
        return self.num_taken < len(self.backlog.costs)

    @property
    def is_alone(self) -> bool:
        """Whether the next part needs a cycle of its own."""
        return self.has_work and (self.backlog.is_alone or self.cost > self.cycle_tokens)

    @property
    def can_pay(self) -> bool:
        return self.has_work and self.cost <= self.credit

    @property
    def may_owe(self) -> bool:
        """Whether the next part may be had in advance: it is large, and nothing is owed yet."""
        is_large = self.has_work and self.cost > self.share
        return is_large and not self.is_alone and self.credit >= 0

    @property
    def num_rounds_short(self) -> int:
        """How many more allotments it needs for its next part."""
        return max(0, -(-(self.cost - self.credit) // self.allotment))

    def grant(self, num_rounds: int = 1) -> None:
        """Add allotments; a run that could pay and was passed over does not get rich meanwhile."""
        most = self.cost + _MAX_SAVED_ROUNDS * self.allotment
        self.credit = min(self.credit + num_rounds * self.allotment, most)

    def take(self) -> int:
        """Take the next part and return what it cost."""
        cost = self.cost
        self.num_taken += 1
        self.credit -= cost
        return cost

    def take_paid(self, room: int | None) -> int:
        """Take what can be paid and fits into a room, and return its cost."""
        num_tokens = 0
        while self.can_pay and not self.is_alone:
            if room is not None and num_tokens + self.cost > room:
                break
            num_tokens += self.take()
        return num_tokens


class FairQueue:
    """The credits of the runs of one engine, and their order.

    Args:
        cycle_tokens: About how many tokens a cycle holds; may be changed between two of them.
    """

    def __init__(self, cycle_tokens: int) -> None:
        self.cycle_tokens = cycle_tokens
        self.first_credit = 0
        """What a run has that had no work before: its first part need not be saved up for if it is
        small. May be changed likewise."""
        # The run that was served longest ago is first.
        self._credits: dict[str, int] = {}
        self._was_alone = False

    def give_back(self, run: str, cost: int) -> None:
        """Return to a run what it paid for a part that was not begun after all."""
        if run in self._credits:
            self._credits[run] += cost

    def take(self, backlogs: Sequence[Backlog]) -> CycleShare:
        """Return what goes into the next cycle; empty only if nothing is ready.

        Args:
            backlogs: One entry with at least one part for each run that has work.
        """
        flows = self._flows(backlogs)
        ready = [flow for flow in flows if flow.backlog.is_ready]
        alone = next((flow for flow in ready if flow.is_alone and flow.can_pay), None)
        if alone is None or (self._was_alone and not all(flow.is_alone for flow in ready)):
            for flow in flows:
                flow.grant()
            alone = self._fill_or_wait(ready)
        if alone is not None:
            alone.take()
        self._was_alone = alone is not None
        self._note(flows)
        num_parts = {flow.backlog.run: flow.num_taken for flow in flows if flow.num_taken}
        return CycleShare(num_parts, is_alone=alone is not None)

    def _fill_or_wait(self, flows: Sequence[_Flow]) -> _Flow | None:
        """Fill a cycle; return a run that is to have it alone if nothing else can be in it."""
        self._fill(flows)
        if not flows or any(flow.num_taken for flow in flows):
            return None
        # All save up: the cycles in which no run could pay are left out.
        num_rounds = min(flow.num_rounds_short for flow in flows)
        for flow in flows:
            flow.grant(num_rounds)
        self._fill(flows)
        if any(flow.num_taken for flow in flows):
            return None
        return next(flow for flow in flows if flow.can_pay)

    def _flows(self, backlogs: Sequence[Backlog]) -> list[_Flow]:
        """Return the runs that have work in their order; forget those that have none."""
        known = {backlog.run: backlog for backlog in backlogs}
        kept = {run: credit for run, credit in self._credits.items() if run in known}
        self._credits = kept | {run: self.first_credit for run in known if run not in kept}
        allotments = self._allotments(backlogs)
        num_runs = Counter(backlog.project for backlog in backlogs)
        return [
            _Flow(
                backlog=known[run],
                share=self.cycle_tokens // len(num_runs) // num_runs[known[run].project],
                allotment=allotments[run],
                credit=credit,
                cycle_tokens=self.cycle_tokens,
            )
            for run, credit in self._credits.items()
        ]

    def _allotments(self, backlogs: Sequence[Backlog]) -> dict[str, int]:
        """Share a cycle out: among projects, and what a project gets among its runs."""
        projects: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for backlog in backlogs:
            debt = max(0, -self._credits[backlog.run])
            projects[backlog.project][backlog.run] = sum(backlog.costs) + debt
        of_projects = share_out(
            self.cycle_tokens, {project: sum(runs.values()) for project, runs in projects.items()}
        )
        return {
            run: allotment
            for project, runs in projects.items()
            for run, allotment in share_out(of_projects[project], runs).items()
        }

    def _fill(self, flows: Sequence[_Flow]) -> None:
        """Let runs take what they can pay, and then what still fits."""
        small = [flow for flow in flows if flow.cost <= flow.share]
        large = [flow for flow in flows if flow.cost > flow.share]
        num_tokens = sum(flow.take_paid(None) for flow in small)
        first = next((flow for flow in large if flow.can_pay and not flow.is_alone), None)
        if first is not None:
            num_tokens += first.take()
        for flow in large:
            num_tokens += flow.take_paid(self.cycle_tokens - num_tokens)
        for flow in large:
            if flow.may_owe and flow.cost <= self.cycle_tokens - num_tokens:
                num_tokens += flow.take()

    def _note(self, flows: Sequence[_Flow]) -> None:
        """Keep the credits; a run that was served goes to the end."""
        for flow in flows:
            run = flow.backlog.run
            if flow.num_taken:
                del self._credits[run]
            self._credits[run] = flow.credit if flow.has_work else 0


def share_out(total: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Share a total out equally, giving none more than it asks for; at least 1 each."""
    allotments = {}
    num_left = len(demands)
    for name, demand in sorted(demands.items(), key=lambda item: item[1]):
        allotments[name] = max(1, min(demand, total // num_left))
        total -= allotments[name]
        num_left -= 1
    return allotments
