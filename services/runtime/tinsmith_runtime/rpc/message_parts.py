"""How many parts a protobuf message has, counted before it is decoded.

Each field of each message within becomes an object where it is decoded, however few bytes it has: a
message of empty ones takes a hundred times its size. So they are counted in the bytes, and what has
too many is refused.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor

from tinsmith_runtime.errors import BatchTooLargeError, MalformedRequestError

MAX_PARTS = 2**18
"""Fields of a request: 64 for each sequence of the largest batch."""
MAX_SAMPLER_PARTS = 2**14
"""Fields of a request to a sampler, which is about one prompt."""

_SAMPLER_PREFIX = "/tinsmith.v1.SamplerService/"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_MORE, _LAST_SHIFT = 0x80, 63

Messages: TypeAlias = "dict[int, Messages]"
"""The fields of a message that hold messages, by number."""


def max_parts_of(method: str) -> int:
    """Return how many parts a request may have; `method` is `/package.Service/Method`."""
    return MAX_SAMPLER_PARTS if method.startswith(_SAMPLER_PREFIX) else MAX_PARTS


async def check_parts(body: bytes, message: Any, max_parts: int) -> None:
    """Refuse a message of too many parts, beside the event loop if there is much to count.

    Args:
        body: Its bytes.
        message: Its class.
        max_parts: How many it may have.

    Raises:
        BatchTooLargeError: If there are more.
        MalformedRequestError: If the bytes are none of a message.
    """
    # A part has at least two bytes.
    if len(body) > 2 * max_parts:
        await asyncio.to_thread(count_parts, body, message.DESCRIPTOR, max_parts)


def count_parts(body: bytes, descriptor: Descriptor, max_parts: int) -> int:
    """Return the number of fields of a message and of those within it.

    Args:
        body: Its bytes.
        descriptor: Says which fields hold messages.
        max_parts: How many there may be.

    Raises:
        BatchTooLargeError: If there are more.
        MalformedRequestError: If the bytes are none of a message.
    """
    messages = _messages_of(descriptor)
    position, end, count = 0, len(body), 0
    outer: list[tuple[int, Messages]] = []
    try:
        while True:
            while position >= end:
                if position > end:
                    raise _malformed("a field is longer than its message")
                if not outer:
                    return count
                end, messages = outer.pop()
            count += 1
            if count > max_parts:
                raise BatchTooLargeError(
                    f"the request has more than {max_parts} parts; send it in several",
                    limit=max_parts,
                )
            key = body[position]
            position += 1
            if key >= _MORE:
                key, position = _read_varint(body, position - 1)
            wire_type = key & 7
            if wire_type == _BYTES:
                size = body[position]
                position += 1
                if size >= _MORE:
                    size, position = _read_varint(body, position - 1)
                within = messages.get(key >> 3)
                if within is None:
                    position += size
                else:
                    outer.append((end, messages))
                    if position + size > end:
                        raise _malformed("a field is longer than its message")
                    end, messages = position + size, within
            elif wire_type == _VARINT:
                while body[position] >= _MORE:
                    position += 1
                position += 1
            elif wire_type in _FIXED_SIZES:
                position += _FIXED_SIZES[wire_type]
            else:
                # Groups are not in use, and what is in them would be counted as nothing.
                raise _malformed(f"wire type {wire_type} is not in use")
    except IndexError as error:
        raise _malformed("it ends within a field") from error


@functools.cache
def _messages_of(descriptor: Descriptor) -> Messages:
    """Return the fields that hold messages; a message within itself is one object."""
    known: dict[str, Messages] = {}

    def look(each: Descriptor) -> Messages:
        if each.full_name not in known:
            found = known[each.full_name] = {}
            for field in each.fields:
                if field.message_type is not None:
                    found[field.number] = look(field.message_type)
        return known[each.full_name]

    return look(descriptor)


def _read_varint(body: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[position]
        position += 1
        value |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return value, position
        shift += 7
        if shift > _LAST_SHIFT:
            raise _malformed("a number has more than 64 bits")


def _malformed(problem: str) -> MalformedRequestError:
    return MalformedRequestError(f"the request is no protobuf message: {problem}")
