"""Protobuf to and from the engine's values, for the pods that share the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinsmith.tensors import TensorFormatError, decode_tensor
from tinsmith.v1 import models_pb2, trajectories_pb2
from tinsmith_engine.base.types import ImageInput, ImageRules, IntArray, ModelInfo
from tinsmith_runtime.errors import EmptyBatchError, InvalidFieldError, ShapeMismatchError


def encode_model(
    base_model: str,
    info: ModelInfo,
    *,
    tokenizer_digest: str,
    stop_token_ids: Sequence[int],
) -> models_pb2.ModelCapabilities:
    """Return the description of a base model."""
    exactness = {
        "exact": models_pb2.ModelCapabilities.EXACTNESS_EXACT,
        "fallback": models_pb2.ModelCapabilities.EXACTNESS_FALLBACK,
        "fast": models_pb2.ModelCapabilities.EXACTNESS_FAST,
    }[info.exactness]
    return models_pb2.ModelCapabilities(
        base_model=base_model,
        vocabulary_size=info.vocab_size,
        max_context_tokens=info.max_context_tokens,
        num_parameters=info.num_parameters,
        exactness=exactness,
        family=info.family,
        numerics_fingerprint=info.fingerprint,
        tokenizer_digest=tokenizer_digest,
        stop_token_ids=stop_token_ids,
        reads_images=info.reads_images,
        dtype=info.dtype,
        images=None if info.images is None else _encode_rules(info.images),
        layers_without_adapters=info.layers_without_adapters,
    )


def _encode_rules(rules: ImageRules) -> models_pb2.ImageRules:
    return models_pb2.ImageRules(
        token_id=rules.token_id,
        token_side_pixels=rules.token_side_pixels,
        min_pixels=rules.min_pixels,
        max_pixels=rules.max_pixels,
    )


def decode_input(
    message: trajectories_pb2.ModelInput, *, field: str
) -> tuple[IntArray, tuple[ImageInput, ...]]:
    """Return the token ids of a prompt, int64 [T], and its images between them.

    Whether the model reads images, and whether these can be read, is seen where the model is known
    (`images.place_images`).

    Raises:
        EmptyBatchError: If it holds neither a token nor an image.
        InvalidFieldError: If a chunk holds nothing.
    """
    parts: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    images = []
    for index, chunk in enumerate(message.chunks):
        path = f"{field}.chunks[{index}]"
        match chunk.WhichOneof("content"):
            case "tokens":
                parts.append(decode_array(chunk.tokens, f"{path}.tokens", np.int64))
            case "image":
                position = sum(part.size for part in parts)
                image = chunk.image
                expected = image.expected_tokens if image.HasField("expected_tokens") else None
                images.append(
                    ImageInput(position, image.data, image.format, path, expected_tokens=expected)
                )
            case _:
                raise InvalidFieldError(path, "must hold tokens or an image")
    if not images and not sum(part.size for part in parts):
        raise EmptyBatchError(field, "holds no token")
    return np.concatenate(parts), tuple(images)


def decode_array(
    message: Any,
    path: str,
    dtype: type[np.generic],
    *,
    allows_several: bool = False,
) -> Any:
    """Return an array, converted within its kind: ids stay ids, numbers stay numbers.

    Args:
        message: A `Tensor`.
        path: The field that it is, for errors.
        dtype: What to convert to.
        allows_several: Whether the shape may be [T, K] as well as [T].
    """
    try:
        array = decode_tensor(message)
    except TensorFormatError as error:
        raise ShapeMismatchError(path, f"is not a tensor: {error}") from error
    ranks = {1} | ({2} if allows_several else set())
    if array.ndim not in ranks:
        wanted = "[T] or [T, K]" if allows_several else "[T]"
        raise ShapeMismatchError(path, f"must have shape {wanted}, got {list(array.shape)}")
    is_float = np.issubdtype(array.dtype, np.floating)
    if is_float != np.issubdtype(dtype, np.floating):
        wanted = "float32" if np.issubdtype(dtype, np.floating) else "int64 or int32"
        raise ShapeMismatchError(path, f"must be {wanted}, got {array.dtype}")
    return array.astype(dtype, copy=False)
