"""Batches and their results: the Tinker wire to the native contract and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tinsmith.tensors import decode_tensor as decode_native
from tinsmith.tensors import encode_tensor as encode_native
from tinsmith.v1 import trainer_pb2, trajectories_pb2
from tinsmith_gateway.proxy.protobuf_scan import leading_fields
from tinsmith_gateway.tinker import wire_pb2
from tinsmith_gateway.tinker.wire import tensor_codec
from tinsmith_runtime.errors import BatchTooLargeError, InvalidFieldError, MalformedRequestError
from tinsmith_runtime.rpc.message_parts import MAX_PARTS, count_parts

ForwardBackwardRequest = wire_pb2.ForwardBackwardRequest

_INTEGER_INPUTS = frozenset({"target_tokens"})
_TOKENS = np.dtype("<i4")
_IMAGE_FORMATS = frozenset({"png", "jpeg"})
_OUTPUT_TYPE = "ArrayRecord"
_LAST_REFERENCE_FIELD = wire_pb2.ForwardBackwardRequest.SEQ_ID_FIELD_NUMBER


def parse_forward_backward(body: bytes) -> wire_pb2.ForwardBackwardRequest:
    """Return a request.

    Raises:
        MalformedRequestError: If the bytes are none.
        BatchTooLargeError: If it has too many parts.
    """
    count_parts(body, wire_pb2.ForwardBackwardRequest.DESCRIPTOR, MAX_PARTS)
    try:
        return wire_pb2.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise MalformedRequestError(
            "the body is no protobuf ForwardBackwardRequest of the tinker SDK 0.38"
        ) from error


def count_tokens(request: wire_pb2.ForwardBackwardRequest) -> int:
    """Return how many text tokens a batch holds."""
    num_bytes = sum(
        len(chunk.encoded_text.tokens) for datum in request.data for chunk in datum.model_input
    )
    return num_bytes // _TOKENS.itemsize


def parse_reference(head: bytes) -> wire_pb2.ForwardBackwardRequest:
    """Return model and number of a request of which only the beginning is there.

    Raises:
        MalformedRequestError: If it does not begin with them.
    """
    return parse_forward_backward(leading_fields(head, _LAST_REFERENCE_FIELD))


def decode_data(
    data: Sequence[wire_pb2.Datum], max_dense_bytes: int
) -> list[trajectories_pb2.Datum]:
    """Return a batch.

    Args:
        data: The datums.
        max_dense_bytes: What all sparse tensors together may take once they are dense.

    Raises:
        BatchTooLargeError: If they claim more.
        InvalidFieldError: If a datum cannot be one; the field says which.
    """
    claimed = sum(
        tensor_codec.claimed_bytes(tensor)
        for datum in data
        for tensor in datum.loss_fn_inputs.values()
    )
    if claimed > max_dense_bytes:
        raise BatchTooLargeError(
            f"the sparse tensors of the batch stand for {claimed} bytes, {max_dense_bytes} are "
            "allowed; send it in parts",
            limit=max_dense_bytes,
        )
    return [_decode_datum(datum, f"data[{index}]") for index, datum in enumerate(data)]


def decode_config(request: wire_pb2.ForwardBackwardRequest) -> dict[str, float | str]:
    """Return the settings of the loss, by name."""
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    config: dict[str, float | str] = {}
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return config


def numeric_config(config: dict[str, float | str]) -> dict[str, float]:
    """Return settings that have to be numbers.

    Raises:
        InvalidFieldError: If one is text.
    """
    for name, value in config.items():
        if isinstance(value, str):
            raise InvalidFieldError(f"loss_fn_config.{name}", "must be a number")
    return {name: float(value) for name, value in config.items()}


def decode_tokens(data: bytes, field: str) -> trajectories_pb2.Chunk:
    """Return a chunk of packed int32 token ids."""
    tokens_T = tensor_codec.read_array(data, _TOKENS, field)
    return trajectories_pb2.Chunk(tokens=encode_native(tokens_T))


def image_chunk(
    data: bytes, image_format: str, expected_tokens: int | None, field: str
) -> trajectories_pb2.Chunk:
    """Return a chunk of an encoded image.

    Raises:
        InvalidFieldError: If it is neither PNG nor JPEG.
    """
    if image_format not in _IMAGE_FORMATS:
        raise InvalidFieldError(f"{field}.format", f"must be png or jpeg, got {image_format!r}")
    image = trajectories_pb2.ImageChunk(
        data=data, format=image_format, expected_tokens=expected_tokens
    )
    return trajectories_pb2.Chunk(image=image)


def _decode_datum(datum: wire_pb2.Datum, field: str) -> trajectories_pb2.Datum:
    chunks = [
        _decode_chunk(chunk, f"{field}.model_input[{index}]")
        for index, chunk in enumerate(datum.model_input)
    ]
    inputs = {
        name: encode_native(_decode_input(name, tensor, f"{field}.loss_fn_inputs.{name}"))
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return trajectories_pb2.Datum(
        model_input=trajectories_pb2.ModelInput(chunks=chunks), loss_inputs=inputs
    )


def _decode_input(name: str, tensor: wire_pb2.Tensor, field: str) -> NDArray[np.generic]:
    array = tensor_codec.decode_tensor(tensor, field)
    wanted: np.dtype[Any] = np.dtype(np.int64 if name in _INTEGER_INPUTS else np.float32)
    if np.issubdtype(wanted, np.integer) and not np.issubdtype(array.dtype, np.integer):
        raise InvalidFieldError(f"{field}.dtype", "must be int64")
    return array.astype(wanted, copy=False)


def _decode_chunk(chunk: wire_pb2.Chunk, field: str) -> trajectories_pb2.Chunk:
    match chunk.WhichOneof("chunk"):
        case "encoded_text":
            return decode_tokens(chunk.encoded_text.tokens, f"{field}.tokens")
        case "image":
            image = chunk.image
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            return image_chunk(image.data, image.format, expected, field)
        case "dmel":
            raise InvalidFieldError(field, "is audio, which no base model here reads")
    raise InvalidFieldError(field, "is empty")


def encode_output(
    outputs: Sequence[trainer_pb2.DatumOutput], metrics: dict[str, float]
) -> wire_pb2.ForwardBackwardOutput:
    """Return the results of a batch; one record for each run of datums of equal width."""
    arrays_ = [decode_native(output.logprobs).astype("<f4", copy=False) for output in outputs]
    records = [
        _record(list(group)) for _, group in groupby(arrays_, key=lambda array: array.shape[1:])
    ]
    return wire_pb2.ForwardBackwardOutput(
        loss_fn_output_type=_OUTPUT_TYPE, loss_fn_outputs=records, metrics=metrics
    )


def _record(group: list[NDArray[Any]]) -> wire_pb2.ArrayRecord:
    ends = np.cumsum([0, *(array.nbytes for array in group)], dtype="<i8")
    batched = wire_pb2.BatchedTensor(
        data=b"".join(array.tobytes() for array in group),
        offsets=ends.tobytes(),
        dtype=wire_pb2.DTYPE_FLOAT32,
        trailing_shape=group[0].shape[1:],
    )
    return wire_pb2.ArrayRecord(
        type_tag=_OUTPUT_TYPE, fields={"logprobs": batched}, num_datums=len(group)
    )
