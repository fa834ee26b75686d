"""What the engine needs of a model, whichever implementation runs it.

`decoder.Decoder` is our own packed forward; `fallback.FallbackModel` wraps a transformers module.
Both see a run as a row of numbers plus a layout, and neither keeps state between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from tinsmith_engine.head import TokenLossFunction
from tinsmith_engine.linear import UnitSpec
from tinsmith_engine.packing import MicroBatch
from tinsmith_engine.rows import RowLayout

BoundT = TypeVar("BoundT")


@dataclass(frozen=True, slots=True)
class RunTensors:
    """The row of one run, for a model to bind to."""

    layout: RowLayout
    theta_P: Tensor
    grad_P: Tensor | None
    """None for weights that are only read, such as a published version."""
    scale: float
    """`alpha / rank` of an adapter; unused by full-parameter runs."""
    is_full: bool


class Scores(NamedTuple):
    """What a pass over a micro-batch found, float32 [N] each, in packed order."""

    logprobs_N: Tensor
    loss_N: Tensor


class Model(Protocol, Generic[BoundT]):
    """A base model that runs can be bound to; `BoundT` is its own view of a run."""

    lora_units: Sequence[UnitSpec]
    full_layout: RowLayout

    def initial_row(self) -> Tensor:
        """Return the base model's weights as a row of `full_layout`."""

    def bind(self, run: RunTensors | None) -> BoundT:
        """Return the weights of a run, or of the base model, ready for a pass.

        Where the base model is not float32, or the run trains all weights, this copies: bind again
        once theta has changed.
        """

    def score(
        self,
        bound: BoundT,
        micro_batch: MicroBatch,
        loss_function: TokenLossFunction,
        *,
        needs_gradient: bool,
    ) -> Scores:
        """Score a micro-batch; with `needs_gradient`, also add to the bound run's gradient row."""
