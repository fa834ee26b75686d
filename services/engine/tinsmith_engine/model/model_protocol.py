"""What the engine needs of a model, whichever implementation runs it.

`decoder.Decoder` is our own packed forward; `fallback.FallbackModel` wraps a transformers module.
Both see a run as a row of numbers plus a layout, and neither keeps state between passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from tinsmith_engine.arena.adapter_targets import TargetSpec
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.base.types import ImageInput
from tinsmith_engine.model.lm_head import HeadGroup, HeadScores
from tinsmith_engine.packing.moe_routing import Routes
from tinsmith_engine.packing.packing import PackedRows

BoundT = TypeVar("BoundT")


@dataclass(frozen=True, slots=True)
class RunTensors:
    """The row of one run, or the rows of an adapter group of runs, for a model to bind to."""

    layout: ParameterLayout
    theta_P: Tensor
    """Float32 [P], or [R, P] for an adapter group of adapters."""
    grad_P: Tensor | None
    """As theta; None for weights that are only read, such as an exported version."""
    scale: float
    """`alpha / rank` of an adapter; unused by full-parameter runs."""
    is_full: bool


@dataclass(frozen=True, slots=True)
class BoundRows(Generic[BoundT]):
    """Rows of a pass, and the adapters that they use."""

    rows: slice
    bound: BoundT
    """What `bind` returned for an adapter group of R runs, whose rows have equal numbers."""
    accumulates: bool
    """Whether the runs' gradient rows hold something; if not they are overwritten."""


@dataclass(frozen=True, slots=True)
class Pass(Generic[BoundT]):
    """One forward, or forward and backward, over the sequences of several runs.

    Attributes:
        rows: The tokens.
        weights: What `bind` returned for the base model, or for a full-parameter run, which is
            then alone in the pass.
        adapted: The rows that use adapters; others see the weights as they are.
        heads: Which rows are scored, and how. `HeadGroup.lora` is filled in by `head_adapter`.
        images: Images, with the row of the first of their placeholders.
        routes: Filled in by `score`: which experts the tokens went to, by layer, if the model can
            tell.
    """

    rows: PackedRows
    weights: BoundT
    adapted: Sequence[BoundRows[BoundT]]
    heads: Sequence[HeadGroup]
    images: Sequence[tuple[int, ImageInput]] = ()
    routes: dict[int, Routes] = field(default_factory=dict)


class Model(Protocol, Generic[BoundT]):
    """A base model that runs can be bound to; `BoundT` is its own view of a run."""

    lora_targets: Sequence[TargetSpec]
    full_layout: ParameterLayout
    row_quantum: int
    """A pass has a multiple of this many rows."""
    groups_adapters: bool
    """Whether several runs may share one `BoundRows`."""
    trains_all: bool
    """Whether a run may train all weights: `full_layout` holds them."""
    other_modules: Sequence[str]
    """Module paths of linear layers that take no adapter and are in no target."""
    unreachable_experts: Sequence[str]
    """Module paths of experts whose matrices are one tensor, which adapters do not reach."""
    unreachable_layers: Mapping[str, str]
    """Of each kind of target, the path of a layer that adapters do not reach, if there is one."""

    def first_layers(self) -> Model[BoundT]:
        """Return a smaller model that rounds as this one does, for the check at start."""

    def initial_parameters(self) -> Tensor:
        """Return the base model's weights as a row of `full_layout`."""

    def bind(self, run: RunTensors | None) -> BoundT:
        """Return the weights of runs, or of the base model, ready for a pass.

        Where the base model is not float32, or the run trains all weights, this copies: bind again
        once theta has changed.
        """

    def head_adapter(self, bound: BoundT, index: int) -> Any:
        """Return the adapter of the unembedding of one run of an adapter group, or None."""

    def score(self, one: Pass[BoundT], *, needs_gradient: bool) -> list[HeadScores]:
        """Score the heads of a pass; with `needs_gradient`, also add to the gradient rows."""
