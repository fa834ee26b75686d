"""Steps from which nothing is learned: each kind is told once, with what to change."""

from __future__ import annotations

import math
from collections.abc import Callable

_MAX_KL = 0.01
"""Above it Tinker's documentation warns of numerical trouble."""
_PATIENCE = 3
"""Steps in a row after which it is no accident."""


class Health:
    """Looks at the figures of each step.

    Args:
        say: Is told a warning.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._num_in_a_row: dict[str, int] = {}
        self._told: set[str] = set()

    def note_trained(self, num_sequences: int) -> None:
        """Note how many sequences a step of reinforcement learning was trained on."""
        self._note(
            num_sequences == 0,
            f"no group of the last {_PATIENCE} steps differs in reward: nothing is learned; raise "
            "temperature or group_size, or begin from a better checkpoint",
        )

    def note_gradient(self, norm: float) -> None:
        """Note the norm of the gradient of a step."""
        if not math.isfinite(norm):
            self._note(
                True,
                "the gradient is not finite: lower learning_rate, or look at the data",
                patience=1,
            )
        self._note(
            norm == 0,
            f"the gradient of the last {_PATIENCE} steps is 0: nothing is learned; lower "
            "learning_rate if it grew away, or look at the data",
        )

    def note_kl(self, kl: float) -> None:
        """Note the KL of the weights that sampled and those that are trained, of a step."""
        self._note(
            abs(kl) > _MAX_KL,
            f"the KL of sampler and trainer was above {_MAX_KL} in the last {_PATIENCE} steps: "
            "training becomes unstable; lower learning_rate",
        )

    def _note(self, is_bad: bool, warning: str, *, patience: int = _PATIENCE) -> None:
        self._num_in_a_row[warning] = self._num_in_a_row.get(warning, 0) + 1 if is_bad else 0
        if self._num_in_a_row[warning] >= patience and warning not in self._told:
            self._told.add(warning)
            self._say(f"warning: {warning}")
