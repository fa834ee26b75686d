"""Recorded model calls: from the wire to the database, and from there to trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinsmith.tensors import TensorFormatError, decode_tensor, encode_tensor
from tinsmith.v1 import episode_pb2, tensors_pb2, trajectories_pb2
from tinsmith_coordinator.episodes.trajectories import (
    Image,
    ModelCall,
    TokenArray,
    Trajectory,
    merge_calls,
)
from tinsmith_coordinator.store.records import NewCall, StoredCall
from tinsmith_runtime.errors import (
    EmptyBatchError,
    InvalidFieldError,
    NotFiniteInputError,
    ShapeMismatchError,
)
from tinsmith_runtime.rpc import requests

ScalarT = TypeVar("ScalarT", bound=np.generic)

_MAX_SEQUENCES = 1024


def decode_call(request: episode_pb2.RecordModelCallRequest) -> NewCall:
    """Return a model call in the form that is stored: all of it but what proves the lease.

    Raises:
        InvalidFieldError: If a tensor is wrong, or tokens, log-probabilities and versions differ in
            length.
    """
    if not 1 <= len(request.sequences) <= _MAX_SEQUENCES:
        raise InvalidFieldError("sequences", f"must be 1 to {_MAX_SEQUENCES}")
    stored = episode_pb2.RecordModelCallRequest(
        prompt=request.prompt, sequences=request.sequences, params=request.params
    )
    for sequence in stored.sequences:
        sequence.ClearField("topk_logprobs")
    _decode_samples(stored, first_index=0)
    return NewCall(
        request_id=requests.decode_request_id(request.request_id),
        digest=requests.digest_of(requests.current_body()),
        num_sequences=len(request.sequences),
        content=stored.SerializeToString(),
    )


def encode_trajectories(
    calls: Iterable[StoredCall],
) -> list[episode_pb2.RecordedTrajectory]:
    """Return the trajectories of stored calls."""
    decoded = [
        sample
        for call in calls
        for sample in _decode_samples(
            episode_pb2.RecordModelCallRequest.FromString(call.content), call.first_index
        )
    ]
    return [_encode_trajectory(trajectory) for trajectory in merge_calls(decoded)]


def _decode_samples(
    message: episode_pb2.RecordModelCallRequest, first_index: int
) -> list[ModelCall]:
    prompt = _decode_prompt(message.prompt)
    return [
        _decode_sample(sequence, prompt, first_index + offset, f"sequences[{offset}]")
        for offset, sequence in enumerate(message.sequences)
    ]


def _decode_sample(
    message: trajectories_pb2.SampledSequence,
    prompt: list[TokenArray | Image],
    index: int,
    path: str,
) -> ModelCall:
    tokens = _decode_tokens(message.tokens, f"{path}.tokens")
    logprobs = _decode_array(message.logprobs, np.float32, f"{path}.logprobs")
    versions = _decode_array(message.versions, np.int64, f"{path}.versions")
    for field, array in (("logprobs", logprobs), ("versions", versions)):
        if array.size != tokens.size:
            raise ShapeMismatchError(
                f"{path}.{field}", f"has {array.size} entries for {tokens.size} tokens"
            )
    if not np.all(np.isfinite(logprobs)):
        raise NotFiniteInputError(f"{path}.logprobs", "must be finite")
    return ModelCall(index, prompt, tokens, logprobs, versions)


def _decode_prompt(message: trajectories_pb2.ModelInput) -> list[TokenArray | Image]:
    pieces: list[TokenArray | Image] = []
    for index, chunk in enumerate(message.chunks):
        path = f"prompt.chunks[{index}]"
        match chunk.WhichOneof("content"):
            case "tokens":
                pieces.append(_decode_tokens(chunk.tokens, f"{path}.tokens"))
            case "image":
                pieces.append(Image(chunk.image.data, chunk.image.format))
            case _:
                raise InvalidFieldError(path, "must hold tokens or an image")
    if not any(piece.size for piece in pieces if not isinstance(piece, Image)):
        raise EmptyBatchError("prompt", "holds no token")
    return pieces


def _decode_tokens(message: tensors_pb2.Tensor, path: str) -> TokenArray:
    tokens = _decode_array(message, np.int64, path)
    if np.any(tokens < 0):
        raise InvalidFieldError(path, "must not hold negative token ids")
    return tokens


def _decode_array(message: tensors_pb2.Tensor, dtype: type[ScalarT], path: str) -> NDArray[ScalarT]:
    try:
        array: NDArray[Any] = decode_tensor(message)
    except TensorFormatError as error:
        raise ShapeMismatchError(path, str(error)) from error
    if array.ndim != 1 or array.dtype.kind != np.dtype(dtype).kind:
        raise ShapeMismatchError(path, f"must be {np.dtype(dtype).name} of shape [T]")
    return array.astype(dtype, copy=False)


def _encode_trajectory(trajectory: Trajectory) -> episode_pb2.RecordedTrajectory:
    message = episode_pb2.RecordedTrajectory(
        tokens=encode_tensor(trajectory.tokens),
        mask=encode_tensor(trajectory.mask),
        logprobs=encode_tensor(trajectory.logprobs),
        versions=encode_tensor(trajectory.versions),
        call_indices=trajectory.call_indices,
        call_ends=trajectory.call_ends,
    )
    for piece in trajectory.prompt:
        if isinstance(piece, Image):
            image = trajectories_pb2.ImageChunk(data=piece.data, format=piece.format)
            message.prompt.chunks.add(image=image)
        else:
            message.prompt.chunks.add(tokens=encode_tensor(piece))
    return message
