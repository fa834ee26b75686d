"""The MLP of a block, dense: the counterpart of `experts.MoeMlp`.

Both are given normed hidden states, return what the residual stream takes, and keep what their
backward needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tinsmith_engine.model.linear import LinearTarget, Saved
from tinsmith_engine.products.ops import EAGER, Ops


class DenseSaved(NamedTuple):
    """What the backward of a dense MLP needs.

    The activation is computed again: it is a fifth of what a layer would keep, and a hundredth of
    its time.
    """

    gate_up: Tensor
    gate_up_saved: Saved
    down_saved: Saved


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """`down(silu(gate(x)) * up(x))`."""

    gate_up: LinearTarget
    down: LinearTarget
    ops: Ops = EAGER

    def forward(self, x: Tensor) -> tuple[Tensor, DenseSaved]:
        """Return y [N, H] for x [N, H], and what `backward` needs."""
        gate_up, gate_up_saved = self.gate_up.forward(x)
        activated = self.ops.swiglu(gate_up)
        y, down_saved = self.down.forward(activated)
        return y, DenseSaved(gate_up, gate_up_saved, down_saved)

    def backward(self, dy: Tensor, x: Tensor, saved: DenseSaved) -> Tensor:
        """Add the parameter gradients to the runs' rows; return the gradient for x."""
        activated = self.ops.swiglu(saved.gate_up)
        dactivated = given(self.down.backward(dy, activated, saved.down_saved))
        dgate_up = self.ops.swiglu_backward(dactivated, saved.gate_up)
        return given(self.gate_up.backward(dgate_up, x, saved.gate_up_saved))


def given(gradient: Tensor | None) -> Tensor:
    """Return an input gradient that was asked for."""
    if gradient is None:
        raise AssertionError("a unit that was asked for the input gradient returned none")
    return gradient
