"""Bodies that cost more than they are: a few hostile forms for any method and any route."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINTS = frozenset(
    getattr(FieldDescriptor, f"TYPE_{name}")
    for name in ("INT32", "INT64", "UINT32", "UINT64", "SINT32", "SINT64", "BOOL", "ENUM")
)
_MAX_DEPTH = 5


def messages(
    descriptor: Descriptor, names: Mapping[str, str], size: int
) -> Iterator[tuple[str, bytes]]:
    """Yield forms and bodies of a request.

    Args:
        descriptor: Of the request.
        names: Values of its text fields that name something, so that it is looked at further.
        size: Of a body, in bytes.
    """
    head = b"".join(
        _field(field, names[field.name].encode())
        for field in descriptor.fields
        if field.name in names and _is_text(field) and not field.is_repeated
    )
    wanted: dict[
        str, tuple[Callable[[FieldDescriptor], bool], Callable[[FieldDescriptor], bytes]]
    ] = {
        "empty parts": (_is_list_of_messages, lambda field: _field(field, b"") * (size // 3)),
        "entries": (_is_map, lambda field: _entries(field, size)),
        "texts": (
            lambda field: field.is_repeated and _is_text(field),
            lambda field: _field(field, b"a") * (size // 4),
        ),
        "a long text": (
            lambda field: _is_text(field) and not field.is_repeated and field.name not in names,
            lambda field: _field(field, b"1" * size),
        ),
        "bytes": (
            lambda field: field.type == FieldDescriptor.TYPE_BYTES,
            lambda field: _field(field, b"\x01" * size),
        ),
        "numbers": (
            lambda field: field.is_repeated and field.type in _VARINTS,
            lambda field: (varint(field.number << 3) + b"\x01") * (size // 3),
        ),
        "packed numbers": (
            lambda field: field.is_repeated and field.type in _VARINTS,
            lambda field: _field(field, b"\x01" * size),
        ),
    }
    for form, (is_wanted, content) in wanted.items():
        path = _find(descriptor, is_wanted)
        if path is not None:
            body = content(path[-1])
            for outer in reversed(path[:-1]):
                body = _field(outer, body)
            yield form, head + body
    yield "unknown fields", head + (varint(5000 << 3) + b"\x01") * (size // 4)
    yield "groups", head + varint(5000 << 3 | 3) * (size // 3)
    yield "cut", head + varint(5000 << 3 | 2) + varint(size) + bytes(size - 1)
    yield "zeros", bytes(size)


def documents(fields: Sequence[str], size: int) -> Iterator[tuple[str, bytes]]:
    """Yield forms and bodies in JSON.

    Args:
        fields: Each has the hostile value.
        size: Of a body, in bytes.
    """
    each = size // len(fields)
    for form, value in {
        "a long text": json.dumps("1" * each),
        "wrong numbers": f"[{'-1,' * (each // 3)}-1]",
        "lists": f"[{'[],' * (each // 3)}[]]",
        "objects": f"[{'{},' * (each // 3)}{{}}]",
        "wrong parts": "[" + '{"type":0},' * (each // 11) + "0]",
        "depth": "[" * (each // 2) + "]" * (each // 2),
        "keys": "{" + ",".join(f'"{n:x}":0' for n in range(each // 9)) + "}",
        "one number": "9" * each,
        "escapes": json.dumps("\u00e9" * (each // 6)),
        "messages": "[" + ",".join(['{"role":"user","content":"a"}'] * (each // 30)) + "]",
    }.items():
        yield form, ("{" + ",".join(f'"{field}":{value}' for field in fields) + "}").encode()
    yield "cut", b'{"prompt":"' + b"a" * (size - 11)
    yield "an open text", b'{"prompt":"' + b'\\"[' * (size // 3)
    yield "no text", b"\xff" * size


def _find(
    descriptor: Descriptor, is_wanted: Callable[[FieldDescriptor], bool]
) -> list[FieldDescriptor] | None:
    """Return the shortest path of fields to one that is wanted."""
    paths: list[tuple[list[FieldDescriptor], Descriptor]] = [([], descriptor)]
    for path, message in paths:
        for field in message.fields:
            if is_wanted(field):
                return [*path, field]
            if field.message_type is not None and not _is_map(field) and len(path) < _MAX_DEPTH:
                paths.append(([*path, field], field.message_type))
    return None


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_list_of_messages(field: FieldDescriptor) -> bool:
    return field.is_repeated and field.message_type is not None and not _is_map(field)


def _is_text(field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_STRING


def _entries(field: FieldDescriptor, size: int) -> bytes:
    count = size // 10
    keys = (b"%06x" % number for number in range(count))
    return b"".join(_field(field, b"\x0a" + varint(len(key)) + key) for key in keys)


def _field(field: FieldDescriptor, content: bytes) -> bytes:
    return varint(field.number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
