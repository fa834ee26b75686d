"""The reference of the contract: a page for each file, made of the comments that stand in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from docs.descriptors import (
    ENUM_VALUE,
    FILE_ENUM,
    FILE_MESSAGE,
    FILE_SERVICE,
    MESSAGE_ENUM,
    MESSAGE_FIELD,
    MESSAGE_NESTED,
    SERVICE_METHOD,
    Comments,
    files,
)
from google.protobuf import descriptor_pb2

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = ".tinsmith.v1."
_HEAD = """# Contract

Generated from the comments of `proto/tinsmith/v1`, a page for each file. The package is
`tinsmith.v1`; a key goes into the metadata of each call, as `authorization: Bearer tsk_...`.
Reasons of errors are in [Errors](../../errors.md), the roles that may call a method in
[Permissions](../../permissions.md).

| file | holds |
| --- | --- |
"""


def pages() -> Mapping[str, str]:
    """Return the pages by their names below the folder of references."""
    found = {}
    rows = []
    for file, comments in files():
        name = f"{PurePosixPath(file.name).stem}.md"
        about = " ".join(comments.of_file.split())
        rows.append(f"| [`{file.name}`]({name}) | {about} |\n")
        found[f"contract/{name}"] = "\n".join(_file(file, comments, about))
    return {"contract/index.md": _HEAD + "".join(rows), **found}


def _file(
    file: descriptor_pb2.FileDescriptorProto, comments: Comments, about: str
) -> Iterator[str]:
    yield f"# {PurePosixPath(file.name).stem}.proto\n\n{about}\n"
    for index, service in enumerate(file.service):
        path = (FILE_SERVICE, index)
        yield f"## {service.name}\n\n{_prose(comments[path])}\n"
        for place, method in enumerate(service.method):
            stream = "a stream of " if method.server_streaming else ""
            yield f"### {method.name}\n"
            yield f"`{_short(method.input_type)}` → {stream}`{_short(method.output_type)}`\n"
            yield f"{_prose(comments[(*path, SERVICE_METHOD, place)])}\n"
    for index, message in enumerate(file.message_type):
        yield from _message(message, comments, (FILE_MESSAGE, index), "")
    for index, enum in enumerate(file.enum_type):
        yield from _enum(enum, comments, (FILE_ENUM, index), "")


def _message(
    message: descriptor_pb2.DescriptorProto, comments: Comments, path: tuple[int, ...], owner: str
) -> Iterator[str]:
    if message.options.map_entry:
        return
    name = f"{owner}{message.name}"
    yield f"## {name}\n\n{_prose(comments[path])}\n"
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    if message.field:
        yield "| field | type | meaning |\n| --- | --- | --- |"
        for place, field in enumerate(message.field):
            meaning = _cell(comments[(*path, MESSAGE_FIELD, place)])
            yield f"| `{field.name}` | `{_type(field, maps)}` | {meaning} |"
        yield ""
    for place, nested in enumerate(message.nested_type):
        yield from _message(nested, comments, (*path, MESSAGE_NESTED, place), f"{name}.")
    for place, enum in enumerate(message.enum_type):
        yield from _enum(enum, comments, (*path, MESSAGE_ENUM, place), f"{name}.")


def _enum(
    enum: descriptor_pb2.EnumDescriptorProto, comments: Comments, path: tuple[int, ...], owner: str
) -> Iterator[str]:
    yield f"## {owner}{enum.name}\n\n{_prose(comments[path])}\n"
    yield "| value | number | meaning |\n| --- | --- | --- |"
    for place, value in enumerate(enum.value):
        meaning = _cell(comments[(*path, ENUM_VALUE, place)])
        yield f"| `{value.name}` | {value.number} | {meaning} |"
    yield ""


def _type(field: _Field, maps: Mapping[str, descriptor_pb2.DescriptorProto]) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = entry.field
        return f"map<{_scalar(key)}, {_scalar(value)}>"
    repeated = "repeated " if field.label == _Field.LABEL_REPEATED else ""
    optional = "optional " if field.proto3_optional else ""
    return f"{repeated}{optional}{_scalar(field)}"


def _scalar(field: _Field) -> str:
    if field.type_name:
        return _short(field.type_name)
    return _Field.Type.Name(field.type).removeprefix("TYPE_").lower()


def _short(name: str) -> str:
    return name.removeprefix(_PACKAGE).removeprefix(".")


def _prose(comment: str) -> str:
    """Return a comment as Markdown: lists need an empty line before them."""
    return re.sub(r"(?m)(^(?!\* |  ).+\n)(?=\* )", r"\1\n", comment)


def _cell(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|")
