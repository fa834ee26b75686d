"""Model calls are checked before they are kept, and come back as trajectories."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np
import pytest

from tinsmith.tensors import decode_tensor, encode_tensor, encode_tokens
from tinsmith.v1 import episode_pb2, trajectories_pb2
from tinsmith_coordinator.rpc import call_codec
from tinsmith_coordinator.store.records import NewCall, StoredCall
from tinsmith_runtime.errors import (
    EmptyBatchError,
    InvalidFieldError,
    NotFiniteInputError,
    ShapeMismatchError,
)
from tinsmith_runtime.rpc.requests import bind_body, digest_of

Request = episode_pb2.RecordModelCallRequest
IMAGE = trajectories_pb2.ImageChunk(data=b"red", format="png")


def call_of(num_sequences: int = 1) -> Request:
    request = Request(request_id=str(uuid.uuid4()), api_key="secret")
    request.prompt.chunks.add(tokens=encode_tokens([1, 2]))
    request.prompt.chunks.add(image=IMAGE)
    for number in range(num_sequences):
        sequence = request.sequences.add(
            tokens=encode_tokens([3, 4 + number]),
            logprobs=encode_tensor(np.array([-0.5, -0.25], np.float32)),
            versions=encode_tensor(np.array([7, 8])),
        )
        sequence.topk_logprobs.token_ids.CopyFrom(encode_tokens([1]))
    return request


def decoded(request: Request) -> NewCall:
    with bind_body(request.SerializeToString()):
        return call_codec.decode_call(request)


def test_a_call_is_kept_without_its_secret_and_comes_back() -> None:
    request = call_of(2)
    call = decoded(request)
    assert (call.request_id, call.num_sequences) == (request.request_id, 2)
    assert call.digest == digest_of(request.SerializeToString())
    assert b"secret" not in call.content
    assert not any(
        each.HasField("topk_logprobs") for each in Request.FromString(call.content).sequences
    )
    # What was sent is as it was.
    assert request.sequences[0].HasField("topk_logprobs")
    stored = StoredCall(first_index=5, content=call.content)
    first, second = call_codec.encode_trajectories([stored])
    for trajectory, index, last in ((first, 5, 4), (second, 6, 5)):
        assert list(trajectory.call_indices) == [index]
        assert list(trajectory.call_ends) == [2]
        assert decode_tensor(trajectory.prompt.chunks[0].tokens).tolist() == [1, 2]
        assert trajectory.prompt.chunks[1].image == IMAGE
        assert decode_tensor(trajectory.tokens).tolist() == [3, last]
        assert decode_tensor(trajectory.versions).tolist() == [7, 8]
        assert decode_tensor(trajectory.logprobs).tolist() == [-0.5, -0.25]
        assert decode_tensor(trajectory.mask).tolist() == [1, 1]


def test_a_call_has_one_to_1024_sequences() -> None:
    assert decoded(call_of(1024)).num_sequences == 1024
    for number in (0, 1025):
        with pytest.raises(InvalidFieldError, match="sequences"):
            decoded(call_of(number))


def _sequence(field: str, array: np.ndarray) -> Callable[[Request], None]:
    return lambda request: getattr(request.sequences[1], field).CopyFrom(encode_tensor(array))


def _prompt(*chunks: trajectories_pb2.Chunk) -> Callable[[Request], None]:
    return lambda request: request.prompt.CopyFrom(trajectories_pb2.ModelInput(chunks=chunks))


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        (_sequence("tokens", np.array([3, -1])), InvalidFieldError, "sequences[1].tokens"),
        (_sequence("tokens", np.array([[3, 4]])), ShapeMismatchError, "sequences[1].tokens"),
        (_sequence("tokens", np.zeros(2, np.float32)), ShapeMismatchError, "sequences[1].tokens"),
        (
            _sequence("logprobs", np.zeros(3, np.float32)),
            ShapeMismatchError,
            "sequences[1].logprobs",
        ),
        (
            _sequence("logprobs", np.array([0, np.inf], np.float32)),
            NotFiniteInputError,
            "sequences[1].logprobs",
        ),
        (_sequence("versions", np.array([1])), ShapeMismatchError, "sequences[1].versions"),
        (
            _prompt(trajectories_pb2.Chunk(tokens=encode_tokens([-1]))),
            InvalidFieldError,
            "prompt.chunks[0].tokens",
        ),
        (_prompt(trajectories_pb2.Chunk()), InvalidFieldError, "prompt.chunks[0]"),
        (_prompt(trajectories_pb2.Chunk(image=IMAGE)), EmptyBatchError, "prompt"),
        (
            _prompt(trajectories_pb2.Chunk(tokens=encode_tensor(np.zeros(0, np.int64)))),
            EmptyBatchError,
            "prompt",
        ),
    ],
)
def test_a_call_that_is_no_call_is_refused_by_its_field(
    change: Callable[[Request], None], error: type[Exception], field: str
) -> None:
    request = call_of(2)
    change(request)
    with pytest.raises(error) as refusal:
        decoded(request)
    assert refusal.value.metadata["field"] == field  # type: ignore[attr-defined]
