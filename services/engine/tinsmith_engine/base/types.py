"""Values that callers of the engine hand in and get back.

Everything here can be built and checked without torch, because servicers validate a request before
an engine thread sees it. `RunState` names torch tensors, but only in its annotations.

A batch is ragged by nature, so a `Datum` holds one sequence as plain numpy arrays of equal length:
position `i` of the input predicts target `i`. Nothing is shifted inside the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tinsmith_runtime.adapters import AdapterConfig as AdapterConfig
from tinsmith_runtime.adapters import FullConfig as FullConfig
from tinsmith_runtime.adapters import LoraConfig as LoraConfig

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamParams:
    """Hyper-parameters of one AdamW step, with the meaning that torch.optim.AdamW gives them."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest L2 norm of the run's whole gradient; 0 turns clipping off."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image inside a sequence.

    It arrives encoded. Once it is placed (`images.place_images`) it is opened and scaled, and the
    sequence holds a placeholder token for each of its embeddings.
    """

    position: int
    """How many tokens stand before it; once placed, where its placeholders begin."""
    data: bytes
    format: str
    """`png` or `jpeg`."""
    field: str = "images"
    """Where it stood in the request, for errors."""
    pixels: NDArray[np.uint8] | None = None
    """[height, width, 3]; None until it is placed."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of placeholder tokens; zeros until it is placed."""
    expected_tokens: int | None = None
    """What the request takes `num_tokens` to be; None if it does not say."""

    @property
    def num_tokens(self) -> int:
        """Placeholder tokens that it takes."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRules:
    """How the images of a vision-language model are prepared."""

    token_id: int
    """The placeholder."""
    patch_size: int
    """Pixels along a side of a patch."""
    merge_size: int
    """Patches along a side of a token."""
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def token_side_pixels(self) -> int:
        """Pixels along a side of a token."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence of T tokens, placeholders of images included."""

    tokens_T: IntArray
    """Input token ids, int64 [T]; without placeholders as long as the images are not placed."""
    targets_T: IntArray
    """Token id that each position predicts, int64 [T]; or [T, K] for K targets each."""
    loss_inputs: Mapping[str, FloatArray]
    """Per-token inputs of the loss, float32 [T] each; weights may be [T, K]."""
    images: Sequence[ImageInput] = ()
    """In the order of their places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """A batch to score, and to take the gradient of if `is_backward`."""

    run: str | None
    """None means the base model, which has no gradient."""
    batch: Sequence[Datum]
    loss: str
    loss_config: Mapping[str, float]
    is_backward: bool
    micro_batch_tokens: int | None = None
    """Tokens of one microbatch; None is the engine's own choice. A replay gives what was
    recorded, since another split adds floats in another order."""


@dataclass(slots=True)
class BatchResult:
    """What a forward pass found."""

    logprobs: list[FloatArray]
    """For each datum, natural-log probabilities of its targets, float32, in their shape: of all
    tokens, those without a loss (`LossSpec.is_active`) included."""
    metrics: dict[str, float]
    """Named `<name>:<reduction>`; `loss:sum` is always there."""
    micro_batch_tokens: int = 0
    """How the batch was split, if not as the engine splits by itself: 0 means it was."""


@dataclass(slots=True)
class OptimStepResult:
    """What an optimizer step did."""

    version: int
    """Steps applied to the run, this one included."""
    metrics: dict[str, float]


@dataclass(slots=True)
class RunState:
    """Everything needed to go on with a run elsewhere, bit for bit."""

    config: AdapterConfig
    version: int
    tensors: dict[str, Tensor]
    """`theta`, `m`, `v`, and `grad` if a gradient is pending: float32 [P] copies on the CPU."""
    has_gradient: bool
    adam_steps: int | None = None
    """Steps since the moments were zero; None means as many as `version`. They differ in a run
    whose weights were loaded without moments."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Handle of one immutable version."""

    run: str
    """Name of the run, or of the weights that were loaded from files."""
    version: int
    """Optimizer steps applied to the weights."""
    serial: int
    """Counts versions in this process: equal run and version may be exported twice with
    different weights, after a run went back to a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What a loaded base model is and can do."""

    vocab_size: int
    max_context_tokens: int
    """Longest sequence that the engine accepts, prompt and completion together."""
    dtype: str
    num_parameters: int
    exactness: str
    """`exact` on the engine's own packed forward, `fast` if it runs without that promise,
    `fallback` on the transformers module."""
    family: str
    """`model_type` of the model's configuration, such as `qwen3`."""
    fingerprint: str
    """Names everything that may change bits: build, threads, dtype, device, tiles and splits."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The parts of the fingerprint, by name."""
    images: ImageRules | None = None
    """How it reads images; None if it does not."""
    layers_without_adapters: Sequence[str] = ()
    """Kinds of matrices that no adapter reaches: paths of modules with `*` for numbers."""

    @property
    def reads_images(self) -> bool:
        """Whether sequences may hold images."""
        return self.images is not None
