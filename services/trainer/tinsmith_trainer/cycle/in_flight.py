"""The cycles that are being computed, and whether another may begin beside them.

One cycle at a time packs best, but what comes while a long one computes would wait for its end. So
another cycle may begin once that costs little packing: each one before it has begun its first pass,
and is to last a while longer. The engine then takes turns with their passes. A small operation thus
waits for a pass of a large one, not for all of them.

A project is in one cycle at a time, so that it gets no more than its share of the turns; in two
while no other has work, so that its small operations need not wait for its large ones either. An
operation that may be what killed the process shares the engine with nothing.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tinsmith_trainer.execution.slices import Slice, is_suspect

_LONG_S = 0.1
_CYCLES_OF_PROJECT, _CYCLES_OF_ONLY_PROJECT = 1, 2


class _Stage(enum.Enum):
    WAITING = enum.auto()
    SHORT = enum.auto()
    """It is to last less than `_LONG_S`: what is ready waits for its end."""
    LONG = enum.auto()
    PASSED = enum.auto()
    """What is left is short: optimizer steps."""


@dataclass(slots=True, eq=False)
class ComputedCycle:
    """One cycle on its way through the engine.

    Attributes:
        projects: Whose runs are in it.
        is_exclusive: Whether no other may begin before its end.
    """

    projects: frozenset[str]
    is_exclusive: bool
    _on_change: Callable[[], None]
    _stage: _Stage = _Stage.WAITING

    @property
    def lets_another_begin(self) -> bool:
        """Whether it would not be packed better together with what is ready by now."""
        is_open = self._stage in (_Stage.LONG, _Stage.PASSED)
        return is_open and not self.is_exclusive

    @property
    def takes_turns(self) -> bool:
        """Whether it has passes left."""
        return self._stage is not _Stage.PASSED

    def note_pass(self, left_s: float) -> None:
        """Take notice that a pass begins, and about how long the cycle is to take from there."""
        self._enter(_Stage.LONG if left_s >= _LONG_S else _Stage.SHORT)

    def note_passed(self) -> None:
        """Take notice that all passes have ended."""
        self._enter(_Stage.PASSED)

    def _enter(self, stage: _Stage) -> None:
        if stage is not self._stage:
            self._stage = stage
            self._on_change()


class CyclesInFlight:
    """All of them.

    Args:
        on_change: Called when another may begin, perhaps.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._cycles: set[ComputedCycle] = set()

    def __len__(self) -> int:
        return len(self._cycles)

    @property
    def let_another_begin(self) -> bool:
        """Whether another cycle may begin now."""
        return all(cycle.lets_another_begin for cycle in self._cycles)

    def crowded_projects(self, working: Collection[str]) -> frozenset[str]:
        """Return the projects that are in as many cycles as one may be in.

        Args:
            working: The projects that have work, computed or waiting.
        """
        most = _CYCLES_OF_PROJECT if len(working) > 1 else _CYCLES_OF_ONLY_PROJECT
        counts = Counter(
            project for cycle in self._cycles if cycle.takes_turns for project in cycle.projects
        )
        return frozenset(name for name, num in counts.items() if num >= most)

    def begin(self, slices: Sequence[Slice]) -> ComputedCycle:
        """Enter a cycle."""
        cycle = ComputedCycle(
            frozenset(each.run.project for each in slices),
            any(is_suspect(each.run, each.first) for each in slices),
            self._on_change,
        )
        self._cycles.add(cycle)
        return cycle

    def note_end(self, cycle: ComputedCycle, _: object = None) -> None:
        """Forget a cycle, whatever became of it."""
        self._cycles.discard(cycle)
        self._on_change()
