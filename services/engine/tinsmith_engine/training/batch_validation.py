"""Validation of a training batch, once, before the engine computes it.

A pure function over numpy arrays: it runs in the servicer, so that a bad batch is an immediate,
typed answer and costs no engine time. What passed is a `ValidatedBatch`, which the engine takes
without a second look. The engine calls the same function for any other batch: an out-of-range token
would index past an embedding, and a NaN would reach another operation's gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinsmith_engine.base.loss_specs import (
    CLIP_BOUNDS,
    LOSS_NAMES,
    LOSS_SPECS,
    LossSpec,
    full_config,
)
from tinsmith_engine.base.types import (
    AdamParams,
    BatchRequest,
    Datum,
    ModelInfo,
)
from tinsmith_engine.packing.images import check_source_pixels, place_datum
from tinsmith_runtime.errors import (
    EmptyBatchError,
    InvalidFieldError,
    MissingLossInputError,
    NotFiniteInputError,
    SequenceTooLongError,
    ShapeMismatchError,
    TokenOutOfVocabularyError,
    UnknownLossError,
)

MAX_TARGETS = 128
"""Most targets of one position, for losses that take several."""
_MASKS = frozenset({"sequence_ratio_mask", "sampled_mask"})
_LARGEST = float(np.finfo(np.float32).max)


class ValidatedBatch(tuple[Datum, ...]):
    """The datums of a batch that can be trained on, and what they were held against.

    Only `validate_batch` makes one. It vouches for one loss, its settings and one model: with any
    other, the engine checks the batch again.
    """

    _against: tuple[str, Mapping[str, float], ModelInfo]

    def is_valid_for(self, request: BatchRequest, info: ModelInfo) -> bool:
        """Whether the batch was held against what a request asks for, of this model."""
        return self._against == (request.loss, request.loss_config, info)


def validate_batch(
    batch: Sequence[Datum],
    loss: str,
    loss_config: Mapping[str, float],
    info: ModelInfo,
) -> ValidatedBatch:
    """Return a batch that can be trained on, or raise the error that names its first fault.

    Args:
        batch: The datums of one operation.
        loss: Name of a loss in `LOSS_NAMES`.
        loss_config: Settings of the loss; defaults fill what is absent.
        info: The model that the batch is for: gives vocabulary and longest sequence.

    Returns:
        The same datums, which the engine does not check again.

    Raises:
        EmptyBatchError: No datum, or a datum without tokens.
        UnknownLossError: No loss has this name.
        MissingLossInputError: A datum lacks an input of the loss.
        InvalidFieldError: A loss input or setting that the loss does not have, or one out of its
            range: clip bounds that are negative or cross, a negative beta, a mask that is not 0
            or 1.
        ShapeMismatchError: Arrays of one datum differ in length, rank or type; or several targets
            by position for a loss that takes one, or more than `MAX_TARGETS`.
        TokenOutOfVocabularyError: A token or target is negative or not below the vocabulary size.
        NotFiniteInputError: A loss input or setting is NaN or infinite.
        SequenceTooLongError: A sequence exceeds `info.max_context_tokens`.
        InvalidFieldError: An image cannot be read, or the model reads none.
    """
    if loss not in LOSS_NAMES:
        raise UnknownLossError(
            "loss.name", f"{loss!r} is not one of {', '.join(LOSS_NAMES)}", loss=loss
        )
    spec = LOSS_SPECS[loss]
    _check_config(spec, loss_config)
    config = full_config(loss, loss_config)
    if not batch:
        raise EmptyBatchError("data", "holds no datum")
    if info.images is not None:
        check_source_pixels([image for datum in batch for image in datum.images], "data")
    for index, datum in enumerate(batch):
        path = f"data[{index}]"
        _check_datum(path, place_datum(datum, info, path), spec, config, info)
    validated = ValidatedBatch(batch)
    validated._against = (loss, dict(loss_config), info)
    return validated


def prepare_request(request: BatchRequest, info: ModelInfo) -> BatchRequest:
    """Return a request that can be computed: its images are placed, its batch is validated.

    Raises:
        TinsmithError: See `validate_batch`.
    """
    placed = [
        place_datum(datum, info, f"data[{index}]") for index, datum in enumerate(request.batch)
    ]
    batch = request.batch
    if not (isinstance(batch, ValidatedBatch) and batch.is_valid_for(request, info)):
        validate_batch(placed, request.loss, request.loss_config, info)
    return dataclasses.replace(request, batch=placed)


def validate_adam(params: AdamParams) -> None:
    """Raise the error that names the first hyper-parameter that is out of range.

    Raises:
        NotFiniteInputError: A hyper-parameter is NaN or infinite.
        InvalidFieldError: A hyper-parameter is out of range.
    """
    for name, value in dataclasses.asdict(params).items():
        path = f"adam.{name}"
        if not math.isfinite(value):
            raise NotFiniteInputError(path, f"must be finite, got {value}")
        is_valid, wanted = {
            "beta1": (0 <= value < 1, "in [0, 1)"),
            "beta2": (0 <= value < 1, "in [0, 1)"),
            "eps": (value > 0, "above 0"),
        }.get(name, (value >= 0, "at least 0"))
        if not is_valid:
            raise InvalidFieldError(path, f"must be {wanted}, got {value}")


def _check_config(spec: LossSpec, config: Mapping[str, float]) -> None:
    for key, value in config.items():
        path = f'loss.config["{key}"]'
        if key not in spec.config:
            raise InvalidFieldError(path, f"is not a setting of loss {spec.name}")
        if not math.isfinite(value):
            raise NotFiniteInputError(path, f"is {value}")
        if abs(value) > _LARGEST:
            raise InvalidFieldError(path, f"must fit into float32, got {value}")
        if value < 0.0 and key not in CLIP_BOUNDS:
            raise InvalidFieldError(path, f"must not be negative, got {value}")
    merged = {**spec.config, **config}
    low, high = merged.get("clip_low_threshold"), merged.get("clip_high_threshold")
    if low is not None and high is not None and not 0.0 <= low <= high:
        raise InvalidFieldError(
            'loss.config["clip_low_threshold"]',
            f"must be a ratio between 0 and clip_high_threshold ({high}), got {low}",
        )


def _check_datum(
    path: str, datum: Datum, spec: LossSpec, config: Mapping[str, float], info: ModelInfo
) -> None:
    num_tokens = datum.tokens_T.size
    if num_tokens == 0:
        raise EmptyBatchError(f"{path}.model_input", "holds no token")
    if num_tokens > info.max_context_tokens:
        raise SequenceTooLongError(
            f"{path}.model_input holds {num_tokens} tokens, over the model's limit of "
            f"{info.max_context_tokens}; send a shorter sequence",
            field=f"{path}.model_input",
            num_tokens=num_tokens,
            max_context_tokens=info.max_context_tokens,
        )
    _check_array(f"{path}.model_input", datum.tokens_T, num_tokens, _IDS)
    _check_vocabulary(f"{path}.model_input", datum.tokens_T, info.vocab_size)
    targets_path = f'{path}.loss_inputs["target_tokens"]'
    num_targets = _check_targets(targets_path, datum, spec)
    _check_vocabulary(targets_path, datum.targets_T, info.vocab_size)
    for name in spec.inputs:
        if name not in datum.loss_inputs:
            raise MissingLossInputError(
                f'{path}.loss_inputs["{name}"]', f"is required by loss {spec.name}", loss=spec.name
            )
    for name, values in datum.loss_inputs.items():
        field = f'{path}.loss_inputs["{name}"]'
        if name not in (*spec.inputs, *spec.optional_inputs):
            raise InvalidFieldError(field, f"is not an input of loss {spec.name}")
        _check_array(field, values, num_tokens, _NUMBERS, num_targets)
        if not np.isfinite(values).all():
            position = _row_of_first(~np.isfinite(values))
            value = values.flat[int(np.argmin(np.isfinite(values)))]
            raise NotFiniteInputError(field, f"is {value} at position {position}")
        if name in _MASKS and not np.isin(values, (0.0, 1.0)).all():
            position = int(np.argmin(np.isin(values, (0.0, 1.0))))
            raise InvalidFieldError(
                field, f"must be 0 or 1, got {values[position]} at position {position}"
            )
    _check_clip_bounds(path, datum, config)


def _check_targets(field: str, datum: Datum, spec: LossSpec) -> int | None:
    """Return how many targets each position has; None for targets of shape [T]."""
    num_tokens, shape = datum.tokens_T.size, datum.targets_T.shape
    if datum.targets_T.ndim != 2 or shape[0] != num_tokens:
        _check_array(field, datum.targets_T, num_tokens, _IDS)
        return None
    if not spec.allows_several_targets:
        raise ShapeMismatchError(
            field, f"has shape {list(shape)}; loss {spec.name} takes one target for each position"
        )
    if not 1 <= shape[1] <= MAX_TARGETS:
        raise ShapeMismatchError(
            field,
            f"has shape {list(shape)}; a position has 1 to {MAX_TARGETS} targets",
        )
    _check_array(field, datum.targets_T, num_tokens, _IDS, shape[1])
    return int(shape[1])


def _check_clip_bounds(path: str, datum: Datum, config: Mapping[str, float]) -> None:
    """Check bounds that a datum gives by token; the request's stand in for what is absent."""
    given = [name for name in CLIP_BOUNDS if name in datum.loss_inputs]
    if not given:
        return
    low, high = (
        np.broadcast_to(datum.loss_inputs.get(name, np.float32(config[name])), datum.tokens_T.shape)
        for name in CLIP_BOUNDS
    )
    is_wrong = ~((low >= 0.0) & (low <= high))
    if is_wrong.any():
        position = int(np.argmax(is_wrong))
        raise InvalidFieldError(
            f'{path}.loss_inputs["{given[0]}"]',
            "must make a range of ratios from 0 or more upwards, got "
            f"{low[position]} to {high[position]} at position {position}",
        )


class _Kind(NamedTuple):
    """The dtypes that an array may have, and how to name them."""

    kinds: str
    wanted: str


_IDS, _NUMBERS = _Kind("iu", "int64"), _Kind("f", "float32")


def _check_array(
    field: str,
    values: NDArray[np.generic],
    num_tokens: int,
    kind: _Kind,
    num_targets: int | None = None,
) -> None:
    if num_targets is not None and values.shape != (num_tokens, num_targets):
        raise ShapeMismatchError(
            field,
            f"has shape {list(values.shape)}, target_tokens has {[num_tokens, num_targets]}",
        )
    if num_targets is None and values.shape != (num_tokens,):
        raise ShapeMismatchError(
            field, f"has shape {list(values.shape)}, the datum has {num_tokens} tokens"
        )
    if values.dtype.kind not in kind.kinds:
        raise ShapeMismatchError(field, f"has dtype {values.dtype}, must be {kind.wanted}")


def _check_vocabulary(field: str, ids: NDArray[np.int64], vocab_size: int) -> None:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        token = lowest if lowest < 0 else highest
        position = _row_of_first(ids == token)
        raise TokenOutOfVocabularyError(
            field,
            f"holds token {token} at position {position}, the vocabulary has {vocab_size}",
            token=token,
            vocab_size=vocab_size,
        )


def _row_of_first(is_wrong: NDArray[np.bool_]) -> int:
    """Return the first row [T] or [T, K] in which something is wrong."""
    return int(np.argmax(is_wrong.reshape(len(is_wrong), -1).any(1)))
