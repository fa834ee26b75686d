"""Text fields of a protobuf message, read from its bytes without the message's type.

The gateway routes a request on its first field and passes the bytes on untouched: decoding a batch
of tensors to look at a name would cost more than all the rest of its work.
"""

from __future__ import annotations

from tinsmith_runtime.rpc.protobuf_wire import (
    BYTES,
    FIXED_SIZES,
    VARINT,
    malformed,
    read_varint,
)

MAX_NAME_BYTES = 4096
"""Of the text that a request is routed by."""
MAX_FIELDS = 20_000
"""Fields that are looked at. Field 1 comes first wherever messages are written in the order of
their fields, as all known libraries do; a message of millions of tiny ones must not hold the event
loop."""


def read_text_field(body: bytes, wanted: int = 1) -> str:
    """Return the text of a field, a string; empty if the message does not have it.

    As a decoder does, the last of several wins.

    Raises:
        MalformedRequestError: If the bytes are no protobuf message, or the field is no string.
    """
    found = ""
    position, end = 0, len(body)
    for _ in range(MAX_FIELDS):
        if position >= end:
            break
        key, position = read_varint(body, position)
        number, wire_type = key >> 3, key & 7
        if number == 0:
            raise malformed("a field has the number 0")
        if wire_type == BYTES:
            size, position = read_varint(body, position)
            value_begin, position = position, position + size
            if position > end:
                raise malformed("a field is longer than the message")
            if number == wanted and size > MAX_NAME_BYTES:
                raise malformed(f"field {wanted} has more than {MAX_NAME_BYTES} bytes")
            if number == wanted:
                found = _decode_text(body[value_begin:position], wanted)
            continue
        if number == wanted:
            raise malformed(f"field {wanted} is no string")
        if wire_type == VARINT:
            _, position = read_varint(body, position)
        elif wire_type in FIXED_SIZES:
            position += FIXED_SIZES[wire_type]
            if position > end:
                raise malformed("a field is longer than the message")
        else:
            raise malformed(f"wire type {wire_type} is not in use")
    return found


def leading_fields(body: bytes, last: int) -> bytes:
    """Return the fields that a message begins with, up to number `last`; the rest may be cut off.

    Raises:
        MalformedRequestError: If they are not whole.
    """
    position, end = 0, len(body)
    while position < end:
        key, after = read_varint(body, position)
        if key >> 3 > last:
            break
        position = _skip_value(body, after, key & 7)
    return body[:position]


def _skip_value(body: bytes, position: int, wire_type: int) -> int:
    if wire_type == VARINT:
        return read_varint(body, position)[1]
    if wire_type == BYTES:
        size, position = read_varint(body, position)
        position += size
    elif wire_type in FIXED_SIZES:
        position += FIXED_SIZES[wire_type]
    else:
        raise malformed(f"wire type {wire_type} is not in use")
    if position > len(body):
        raise malformed("a field is longer than the message")
    return position


def _decode_text(value: bytes, number: int) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise malformed(f"field {number} is not UTF-8") from error
