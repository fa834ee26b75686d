"""The bytes of a protobuf message, for what reads them without decoding it.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from tinsmith_runtime.errors import MalformedRequestError

VARINT, BYTES = 0, 2
FIXED_SIZES = {1: 8, 5: 4}
"""Bytes of the values of fixed size, by wire type."""
_MAX_VARINT_BYTES = 10


def read_varint(body: bytes, position: int) -> tuple[int, int]:
    """Return a number of variable length, and the position behind it.

    Raises:
        MalformedRequestError: If it is cut off, or too long.
    """
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(body):
            raise malformed("it ends within a number")
        byte = body[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise malformed("a number has more than 64 bits")


def malformed(problem: str) -> MalformedRequestError:
    """Return the refusal of bytes that are no message."""
    return MalformedRequestError(f"the request is no protobuf message: {problem}")
