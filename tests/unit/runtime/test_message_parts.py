"""Parts of a message are counted in its bytes as a decoder would make them."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.v1 import sampler_pb2, tensors_pb2, trainer_pb2, trajectories_pb2
from tinsmith_runtime.errors import BatchTooLargeError, MalformedRequestError
from tinsmith_runtime.rpc.message_parts import (
    MAX_PARTS,
    MAX_SAMPLER_PARTS,
    MAX_TEXT_BYTES,
    check_size,
    count_parts,
)

BATCH = trainer_pb2.ForwardBackwardRequest
TENSORS = st.builds(
    tensors_pb2.Tensor,
    data=st.binary(max_size=300),
    shape=st.lists(st.integers(0, 2**40), max_size=3),
)
CHUNKS = st.builds(trajectories_pb2.Chunk, tokens=TENSORS)
DATUMS = st.builds(
    trajectories_pb2.Datum,
    model_input=st.builds(trajectories_pb2.ModelInput, chunks=st.lists(CHUNKS, max_size=3)),
    loss_inputs=st.dictionaries(st.text(max_size=5), TENSORS, max_size=3),
)
BATCHES = st.builds(BATCH, run=st.text(max_size=200), data=st.lists(DATUMS, max_size=5))


def parts_of(message: Message) -> int:
    """Return the fields of a decoded message and of those within it, as they are written."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            count += sum(3 + parts_of(each) for each in value.values())
        elif field.message_type is not None:
            each: Any
            for each in value if field.is_repeated else [value]:
                count += 1 + parts_of(each)
        else:
            # Numbers of a list are one part.
            count += 1
    return count


@given(BATCHES)
def test_as_many_as_a_decoder_makes(batch: trainer_pb2.ForwardBackwardRequest) -> None:
    body = batch.SerializeToString()
    count = parts_of(batch)
    assert count_parts(body, BATCH.DESCRIPTOR, count) == count
    if count:
        with pytest.raises(BatchTooLargeError, match=f"more than {count - 1} parts"):
            count_parts(body, BATCH.DESCRIPTOR, count - 1)


@given(st.binary(max_size=60) | BATCHES.map(lambda batch: batch.SerializeToString()[:-1]))
def test_other_bytes_are_counted_or_refused_and_what_is_decoded_was_counted(body: bytes) -> None:
    try:
        count_parts(body, BATCH.DESCRIPTOR, MAX_PARTS)
    except MalformedRequestError:
        return
    try:
        batch = BATCH.FromString(body)
    except DecodeError:
        return
    # One that comes twice is merged into one.
    assert parts_of(batch) <= count_parts(body, BATCH.DESCRIPTOR, MAX_PARTS) + len(body)


def test_the_largest_batch_may_have_its_parts_and_a_prompt_its_images() -> None:
    tensor = tensors_pb2.Tensor(data=b"1234", shape=[1])
    datum = trajectories_pb2.Datum(
        model_input=trajectories_pb2.ModelInput(chunks=[trajectories_pb2.Chunk(tokens=tensor)]),
        loss_inputs=dict.fromkeys(("target_tokens", "weights", "advantages", "a", "b"), tensor),
    )
    batch = BATCH(run="r", data=[datum] * 4096)
    assert count_parts(batch.SerializeToString(), BATCH.DESCRIPTOR, MAX_PARTS) < MAX_PARTS
    image = trajectories_pb2.Chunk(image=trajectories_pb2.ImageChunk(data=b"\x89PNG"))
    request = sampler_pb2.SampleRequest(prompt=trajectories_pb2.ModelInput(chunks=[image] * 1000))
    body = request.SerializeToString()
    assert count_parts(body, request.DESCRIPTOR, MAX_SAMPLER_PARTS) < MAX_SAMPLER_PARTS


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"\x0a\x05abc", "a field is longer than its message"),
        (b"\x0a", "it ends within a field"),
        (b"\x08\xff", "it ends within a field"),
        (b"\x0b\x0c", "wire type 3 is not in use"),
        (b"\xff" * 12, "more than 64 bits"),
        # A datum whose prompt is longer than it.
        (b"\x22\x02\x0a\x09", "a field is longer than its message"),
    ],
)
def test_what_is_no_message_is_refused(body: bytes, problem: str) -> None:
    with pytest.raises(MalformedRequestError, match=problem):
        count_parts(body, BATCH.DESCRIPTOR, MAX_PARTS)


def test_only_what_holds_bytes_may_be_large() -> None:
    large = bytes(MAX_TEXT_BYTES + 1)
    check_size(large, BATCH.DESCRIPTOR)
    check_size(large[1:], trainer_pb2.OptimStepRequest.DESCRIPTOR)
    with pytest.raises(BatchTooLargeError, match="the request has more than"):
        check_size(large, trainer_pb2.OptimStepRequest.DESCRIPTOR)


@pytest.mark.parametrize("name", ["run", "unknown"])
def test_a_text_beside_bytes_is_bounded(name: str) -> None:
    text = "a" * (MAX_TEXT_BYTES + 1)
    # Field 1000, which a later release may add.
    body = BATCH(run=text).SerializeToString()
    if name == "unknown":
        body = b"\xc2\x3e" + body[1:]
    with pytest.raises(BatchTooLargeError, match="a text or a list of numbers"):
        count_parts(body, BATCH.DESCRIPTOR, MAX_PARTS)


def test_tensors_may_be_large() -> None:
    tensor = tensors_pb2.Tensor(data=bytes(2 * MAX_TEXT_BYTES))
    chunk = trajectories_pb2.Chunk(tokens=tensor)
    datum = trajectories_pb2.Datum(model_input=trajectories_pb2.ModelInput(chunks=[chunk]))
    assert count_parts(BATCH(data=[datum]).SerializeToString(), BATCH.DESCRIPTOR, MAX_PARTS) == 5
