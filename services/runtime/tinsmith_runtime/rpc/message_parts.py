"""How large a request is, and how many parts it has, before it is decoded.

Each field of each message within becomes an object where it is decoded, however few bytes it has: a
message of empty ones takes a hundred times its size. A text is copied and looked through several
times, and each number of a list becomes an object. So parts are counted in the bytes, and only what
the contract has as `bytes`, such as tensors, images and files, may be large.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tinsmith_runtime.errors import BatchTooLargeError
from tinsmith_runtime.rpc.protobuf_wire import (
    BYTES,
    FIXED_SIZES,
    VARINT,
    malformed,
    read_varint,
)

MAX_PARTS = 2**18
"""Fields of a request: 64 for each sequence of the largest batch."""
MAX_SAMPLER_PARTS = 2**14
"""Fields of a request to a sampler, which is about one prompt."""
MAX_TEXT_BYTES = 4 * 2**20
"""Of a request without `bytes`, and of a text or a list of numbers in any other."""

_SAMPLER_PREFIX = "/tinsmith.v1.SamplerService/"
_MORE = 0x80

Fields: TypeAlias = "dict[int, Fields | None]"
"""The fields of a message that hold messages, by number; None for one that holds `bytes`."""


def max_parts_of(method: str) -> int:
    """Return how many parts a request may have; `method` is `/package.Service/Method`."""
    return MAX_SAMPLER_PARTS if method.startswith(_SAMPLER_PREFIX) else MAX_PARTS


async def check_request(body: bytes, descriptor: Descriptor, max_parts: int) -> None:
    """Refuse what is too large, beside the event loop if there is much to count.

    Args:
        body: The request.
        descriptor: Of its message.
        max_parts: How many it may have.

    Raises:
        BatchTooLargeError: If it, or a text in it, is too large, or has too many parts.
        MalformedRequestError: If the bytes are none of a message.
    """
    check_size(body, descriptor)
    # A part has at least two bytes.
    if len(body) > min(2 * max_parts, MAX_TEXT_BYTES):
        await asyncio.to_thread(count_parts, body, descriptor, max_parts)


def check_size(body: bytes, descriptor: Descriptor) -> None:
    """Refuse a large request that cannot hold `bytes`.

    Raises:
        BatchTooLargeError: If it is too large.
    """
    if len(body) > MAX_TEXT_BYTES and not _may_hold_bytes(descriptor):
        raise _too_large("the request")


def count_parts(body: bytes, descriptor: Descriptor, max_parts: int) -> int:
    """Return the number of fields of a message and of those within it.

    Args:
        body: Its bytes.
        descriptor: Says which fields hold messages, and which `bytes`.
        max_parts: How many there may be.

    Raises:
        BatchTooLargeError: If there are more, or a text or a list of numbers is too large.
        MalformedRequestError: If the bytes are none of a message.
    """
    fields = _fields_of(descriptor)
    position, end, count = 0, len(body), 0
    outer: list[tuple[int, Fields]] = []
    try:
        while True:
            while position >= end:
                if position > end:
                    raise malformed("a field is longer than its message")
                if not outer:
                    return count
                end, fields = outer.pop()
            count += 1
            if count > max_parts:
                raise BatchTooLargeError(
                    f"the request has more than {max_parts} parts; send it in several",
                    limit=max_parts,
                )
            key = body[position]
            position += 1
            if key >= _MORE:
                key, position = read_varint(body, position - 1)
            wire_type = key & 7
            if wire_type == BYTES:
                size = body[position]
                position += 1
                if size >= _MORE:
                    size, position = read_varint(body, position - 1)
                within = fields.get(key >> 3, _TEXT)
                if within is None:
                    position += size
                elif within is _TEXT:
                    if size > MAX_TEXT_BYTES:
                        raise _too_large("a text or a list of numbers in the request")
                    position += size
                else:
                    outer.append((end, fields))
                    if position + size > end:
                        raise malformed("a field is longer than its message")
                    end, fields = position + size, within
            elif wire_type == VARINT:
                while body[position] >= _MORE:
                    position += 1
                position += 1
            elif wire_type in FIXED_SIZES:
                position += FIXED_SIZES[wire_type]
            else:
                # Groups are not in use, and what is in them would be counted as nothing.
                raise malformed(f"wire type {wire_type} is not in use")
    except IndexError as error:
        raise malformed("it ends within a field") from error


_TEXT: Fields = {}
"""What stands for texts, numbers, and fields that this release does not know."""


@functools.cache
def _fields_of(descriptor: Descriptor) -> Fields:
    """Return what holds more than text; a message within itself is one object."""
    known: dict[str, Fields] = {}

    def look(each: Descriptor) -> Fields:
        if each.full_name not in known:
            found = known[each.full_name] = {}
            for field in each.fields:
                if field.message_type is not None:
                    found[field.number] = look(field.message_type)
                elif field.type == FieldDescriptor.TYPE_BYTES:
                    found[field.number] = None
        return known[each.full_name]

    return look(descriptor)


@functools.cache
def _may_hold_bytes(descriptor: Descriptor) -> bool:
    waiting, seen = [_fields_of(descriptor)], set()
    for fields in waiting:
        if id(fields) in seen:
            continue
        seen.add(id(fields))
        if None in fields.values():
            return True
        waiting += [within for within in fields.values() if within is not None]
    return False


def _too_large(what: str) -> BatchTooLargeError:
    return BatchTooLargeError(
        f"{what} has more than {MAX_TEXT_BYTES} bytes; send it in parts", limit=MAX_TEXT_BYTES
    )
