"""Protobuf that is wrong on purpose: valid batches, damaged in their bytes or their meaning."""

from __future__ import annotations

import random

import numpy as np

from tinsmith_gateway.tinker import wire_pb2

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
_NUMBERS = [0, 1, -1, 2, 7, 8, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 10**6]
_NAMES = ["weights", "target_tokens", "logprobs", "advantages", "", "x" * 5000, "\u0000", "é"]
_LOSSES = [
    *("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "custom"),
    *("stable_reinforce", "", "x" * 20_000, "\u0000", "../cross_entropy"),
]


def valid_batch(model_id: str, seq_id: int) -> wire_pb2.ForwardBackwardRequest:
    """Return what the SDK sends for one sequence."""
    request = wire_pb2.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy"
    )
    datum = request.data.add()
    chunk = datum.model_input.add()
    chunk.encoded_text.tokens = np.array(TOKENS[:-1], dtype="<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = wire_pb2.DTYPE_INT64, np.array(TOKENS[1:], "<i8").tobytes()
    targets.shape.append(7)
    weights = datum.loss_fn_inputs["weights"]
    weights.dtype, weights.dense = wire_pb2.DTYPE_FLOAT32, np.ones(7, "<f4").tobytes()
    weights.shape.append(7)
    return request


def damaged_meaning(
    request: wire_pb2.ForwardBackwardRequest, chance: random.Random
) -> wire_pb2.ForwardBackwardRequest:
    """Change a request so that it still is one, with model and number as they were."""
    for _ in range(chance.randint(1, 3)):
        chance.choice(_DAMAGES)(request, chance)
    return request


def damaged_bytes(body: bytes, chance: random.Random) -> bytes:
    """Change bytes: flipped, cut off, doubled, foreign ones put in."""
    data = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0 if place < len(data):
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = chance.randbytes(chance.randint(1, 12))
            case 3:
                data += data[chance.randrange(len(data) + 1) :]
            case 4:
                # A field of any number and wire type, groups and reserved ones included.
                data += bytes([chance.randrange(256)]) + chance.randbytes(chance.randint(0, 9))
            case 5:
                data[place:place] = b"\xff" * 10
            case _:
                # Groups within groups.
                data += b"\x4b" * chance.choice([1, 50, 200, 100_000])
    return bytes(data)


def _tensor(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> wire_pb2.Tensor:
    datum = chance.choice(request.data) if request.data else request.data.add()
    name = chance.choice(list(datum.loss_fn_inputs) or _NAMES)
    return datum.loss_fn_inputs[name]


def _dtype(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    _tensor(request, chance).dtype = chance.choice([0, 1, 2, 3, 4, 5, 99, -1])  # type: ignore[assignment]


def _shape(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    tensor = _tensor(request, chance)
    tensor.shape[:] = [chance.choice(_NUMBERS) for _ in range(chance.randint(0, 4))]


def _content(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    _tensor(request, chance).dense = chance.randbytes(chance.choice([0, 1, 7, 8, 28, 56, 1000]))


def _floats(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    value = chance.choice([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45])
    tensor = _tensor(request, chance)
    tensor.dtype, tensor.dense = wire_pb2.DTYPE_FLOAT32, np.full(7, value, "<f4").tobytes()
    tensor.shape[:] = [7]


def _sparse(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    """A sparse tensor whose indices do not say the truth."""
    tensor = _tensor(request, chance)
    rows = chance.choice([0, 1, 7, 7, 7])
    steps = [chance.choice([0, 1, 1, 2, *_NUMBERS]) for _ in range(rows)]
    crow = np.cumsum([0, *steps], dtype="<i8") if chance.random() < 0.7 else _any(rows + 1, chance)
    size = chance.choice([0, 1, 7, rows])
    columns = _any(size, chance) if chance.random() < 0.5 else np.zeros(size, "<i8")
    tensor.sparse_csr.crow_indices = crow.tobytes()
    tensor.sparse_csr.col_indices = columns.tobytes()
    tensor.sparse_csr.values = np.ones(size, "<i8" if tensor.dtype == 2 else "<f4").tobytes()
    tensor.shape[:] = [rows, chance.choice([1, 4, *_NUMBERS])]


def _any(size: int, chance: random.Random) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([chance.choice([*_NUMBERS[:7], 2**62]) for _ in range(size)], dtype="<i8")


def _loss(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    request.loss_fn = chance.choice(_LOSSES)


def _config(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    name = chance.choice(["beta", "clip_low_threshold", "loss_id", *_NAMES])
    if chance.random() < 0.5:
        request.loss_fn_config[name] = chance.choice([np.nan, np.inf, 1e308, -1.0, 0.2])
    elif chance.random() < 0.5:
        request.loss_fn_config_v2[name].text = chance.choice(["", "loss.x.0", "\u0000", "é" * 999])
    else:
        request.loss_fn_config_v2[name].number = chance.choice([np.nan, np.inf, 1e308, -1.0])


def _input(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    datum = chance.choice(request.data) if request.data else request.data.add()
    chunk = chance.choice(datum.model_input) if datum.model_input else datum.model_input.add()
    match chance.randrange(6):
        case 0:
            chunk.encoded_text.tokens = chance.randbytes(chance.choice([0, 3, 4, 28, 40_000]))
        case 1:
            chunk.image.data = chance.randbytes(chance.choice([0, 100]))
            chunk.image.format = chance.choice(["png", "jpeg", "", "svg", "x" * 5000])
        case 2:
            chunk.image.data = _LARGE_PNG
            chunk.image.format = "png"
        case 3:
            chunk.dmel.dmel = b"x"
        case 4:
            chunk.Clear()
        case _:
            del datum.model_input[:]


def _names(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    datum = chance.choice(request.data) if request.data else request.data.add()
    datum.loss_fn_inputs[chance.choice(_NAMES)].CopyFrom(_tensor(request, chance))


def _size(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    match chance.randrange(3):
        case 0:
            del request.data[:]
        case 1 if request.data:
            request.data.extend([request.data[0]] * chance.choice([1, 100, 5000]))
        case _:
            request.data.add()


def _unknown(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    """Fields that this release does not read, and that may come later."""
    datum = chance.choice(request.data) if request.data else request.data.add()
    number = chance.choice([12, 13, 15])
    content = chance.randbytes(chance.randint(0, 20))
    datum.MergeFromString(bytes([number << 3 | 2, len(content)]) + content)


def _forward(request: wire_pb2.ForwardBackwardRequest, chance: random.Random) -> None:
    del chance
    request.forward_only = not request.forward_only


_DAMAGES = [
    *(_dtype, _shape, _content, _floats, _sparse, _sparse, _loss, _config, _input, _names, _size),
    *(_unknown, _forward),
]
# The head of an image of 60,000 by 60,000 points, and nothing of the image.
_LARGE_PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\xea\x60\x00\x00\xea\x60\x08\x02\x00\x00\x00"
    b"\x8a\x1f\x8d\xb5"
)
