"""Protobuf to and from the index of weights, for trainer and sampler."""

from __future__ import annotations

import hashlib

from google.protobuf.message import DecodeError

from tinsmith.v1 import trainer_control_pb2
from tinsmith_engine.files.weight_index import WeightIndex
from tinsmith_runtime.errors import CheckpointCorruptError, InvalidFieldError
from tinsmith_runtime.rpc.adapter_codec import decode_adapter, encode_adapter

_DIGEST_BYTES = hashlib.sha256().digest_size


def encode_index(index: WeightIndex) -> bytes:
    """Return the serialised index."""
    message = trainer_control_pb2.WeightIndex(
        run=index.run,
        base_model=index.base_model,
        adapter=encode_adapter(index.config),
        version=index.version,
        tensors=[
            trainer_control_pb2.WeightTensor(name=name, shape=shape)
            for name, shape in index.shapes.items()
        ],
        chunk_size_bytes=index.chunk_bytes,
        chunk_sha256s=b"".join(index.digests),
    )
    return message.SerializeToString(deterministic=True)


def decode_index(content: bytes, *, sha256: bytes) -> WeightIndex:
    """Return an index.

    Raises:
        CheckpointCorruptError: If it is none, or does not have this hash.
    """
    if hashlib.sha256(content).digest() != sha256:
        raise CheckpointCorruptError(
            "the index of weights does not have the hash that came with it"
        )
    try:
        message = trainer_control_pb2.WeightIndex.FromString(content)
        digests = message.chunk_sha256s
        return WeightIndex(
            run=message.run,
            base_model=message.base_model,
            config=decode_adapter(message.adapter),
            version=message.version,
            shapes={tensor.name: tuple(tensor.shape) for tensor in message.tensors},
            chunk_bytes=message.chunk_size_bytes,
            digests=tuple(
                digests[begin : begin + _DIGEST_BYTES]
                for begin in range(0, len(digests), _DIGEST_BYTES)
            ),
        )
    except (DecodeError, InvalidFieldError) as error:
        raise CheckpointCorruptError(f"the index of weights cannot be read: {error}") from error
