"""What a recipe tells whoever runs it, and how it is told to stop.

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
        fingerprint: Hash of the settings; others do not resume it.
    """

    run: str
    checkpoint: str
    step: int
    fingerprint: str


class Observer:
    """Does nothing; the base of those that do.

    Attributes:
        begin_from: Resource name of a training checkpoint that a new run begins from; empty for
            initial weights.
        has_sampler: Whether what was held out can be scored by sampling.
    """

    begin_from: str = ""
    has_sampler: bool = True

    def began(self, run: str, first_step: int) -> None:
        """Note the run, and the steps that an earlier part of it did."""

    def step_done(self, num_done: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Note a step that was logged.

        Raises:
            KeyboardInterrupt: If the recipe is to save and stop.
        """

    def saved(self, state: SavedState) -> None:
        """Note a save, once the state file names it."""

    def interruptible(self) -> AbstractContextManager[object]:
        """Return what surrounds work that changes no weights, and may be given up at any point."""
        return contextlib.nullcontext()
