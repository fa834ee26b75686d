"""What a recipe reports while it runs, and how it is told to stop.

A recipe is stopped by `KeyboardInterrupt`, and saves. One that comes from a signal can hit
anywhere, also between the two halves of a step; an observer raises it only where a save contains
just the steps that it counts: behind a logged step, and in `interruptible`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SavedState:
    """The last save of a recipe.

    Attributes:
        run: Resource name of the run.
        checkpoint: Resource name of its checkpoint.
        step: Steps that the checkpoint contains.
        fingerprint: Hash of the settings.
        weights: Model and adapter that it trains, in words; empty in a state that does not say.
    """

    run: str
    checkpoint: str
    step: int
    fingerprint: str
    weights: str = ""


class Observer:
    """Does nothing; the base of those that do.

    Attributes:
        begin_from: Resource name of a training checkpoint that a new run begins from; empty for
            initial weights.
        label: Begins what the recipe says, where several run at once.
        has_sampler: Whether what was held out can be scored by sampling.
        may_change: Whether settings may change on the way. Then only another model or adapter
            begins a new run; else any other setting does.
    """

    begin_from: str = ""
    label: str = ""
    has_sampler: bool = True
    may_change: bool = False

    def began(self, run: str, first_step: int) -> None:
        """Note the run, and the steps that an earlier part of it did."""

    def step_done(self, num_done: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Note a step that was logged.

        Raises:
            KeyboardInterrupt: If the recipe is to save and stop.
        """

    def playing(self, num_done: int, num_steps: int) -> None:
        """Note that what is played goes on, behind so many steps; called for each answer.

        It is called in the client's own thread, and must not block.
        """

    def saved(self, state: SavedState) -> None:
        """Note a save, once the state file names it."""

    def interruptible(self) -> AbstractContextManager[object]:
        """Return what surrounds work that changes no weights, and may be given up at any point."""
        return contextlib.nullcontext()
