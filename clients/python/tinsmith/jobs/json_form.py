"""Jobs between protobuf and the JSON of the Kubernetes resource.

`TrainingJobSpec` and `TrainingJobStatus` have the JSON of the resource, but for two things: amounts
of resources may be numbers there (`cpu: 2`), and are strings here; and a struct has no integers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor

from tinsmith.v1 import job_pb2

API_VERSION = "tinsmith.dev/v1alpha1"
KIND = "TrainingJob"


class JobFormatError(ValueError):
    """A description of a job is not one; the message says where."""


def parse_spec(spec: Mapping[str, Any], *, lenient: bool = False) -> job_pb2.TrainingJobSpec:
    """Return a spec from its JSON.

    Args:
        spec: As in the resource.
        lenient: Whether fields are passed over that this release does not know.

    Raises:
        JobFormatError: If it is not one.
    """
    message = job_pb2.TrainingJobSpec()
    if not lenient:
        _check_names(spec, message.DESCRIPTOR, "spec")
    try:
        json_format.ParseDict(_with_text_amounts(spec), message, ignore_unknown_fields=lenient)
    except json_format.ParseError as error:
        raise JobFormatError(_one_line("spec", error)) from error
    return message


def parse_status(status: Mapping[str, Any]) -> job_pb2.TrainingJobStatus:
    """Return a status from its JSON; what this release does not know is passed over."""
    message = job_pb2.TrainingJobStatus()
    try:
        json_format.ParseDict(dict(status), message, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise JobFormatError(_one_line("status", error)) from error
    return message


def to_json(message: job_pb2.TrainingJobSpec | job_pb2.TrainingJobStatus) -> dict[str, Any]:
    """Return the JSON of a spec or status.

    Raises:
        JobFormatError: If it holds a number that JSON has no word for.
    """
    try:
        value: dict[str, Any] = json_format.MessageToDict(message)
    except (json_format.Error, ValueError, RecursionError) as error:
        raise JobFormatError(f"it has no JSON: {error}") from error
    parameters = value.get("method", {}).get("parameters")
    if parameters:
        value["method"]["parameters"] = _with_whole_numbers(parameters)
    return value


def parse_manifest(manifest: object) -> tuple[str, job_pb2.TrainingJob]:
    """Return the id and the description of a job from a manifest, as `kubectl` takes it.

    Raises:
        JobFormatError: If it is none.
    """
    if not isinstance(manifest, Mapping) or manifest.get("kind") != KIND:
        raise JobFormatError(f"it is no manifest of kind {KIND}")
    if manifest.get("apiVersion") != API_VERSION:
        raise JobFormatError(f"apiVersion must be {API_VERSION}")
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(metadata, Mapping) or name is None:
        raise JobFormatError("metadata.name is missing")
    _check_text(name, "metadata.name")
    spec, labels = manifest.get("spec"), metadata.get("labels") or {}
    if not isinstance(spec, Mapping):
        raise JobFormatError("spec is missing")
    if not isinstance(labels, Mapping):
        raise JobFormatError("metadata.labels is no map of names to texts")
    for key, value in labels.items():
        _check_text(value, f"metadata.labels.{key}")
    job = job_pb2.TrainingJob(spec=parse_spec(spec))
    job.labels.update(labels)
    return name, job


def _check_text(value: object, path: str) -> None:
    """Refuse what YAML reads as another kind than text, as the cluster would.

    Raises:
        JobFormatError: If it is none.
    """
    if isinstance(value, str):
        return
    kind = {bool: "true or false", int: "a number", float: "a number"}.get(type(value))
    if kind is None:
        raise JobFormatError(f"{path} is no text")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    raise JobFormatError(f'{path} is {kind}: put it in quotation marks, "{text}"')


def _with_whole_numbers(value: Any) -> Any:
    """Return JSON in which 8.0 is 8 again: a protobuf struct knows one kind of number."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_names(value: object, kind: Descriptor, path: str) -> None:
    """Refuse a field that there is not, and say which one may be meant.

    Raises:
        JobFormatError: If there is one.
    """
    # Structs and other types of protobuf's own have a JSON of their own.
    if not isinstance(value, Mapping) or kind.full_name.startswith("google.protobuf."):
        return
    fields = {field.json_name: field for field in kind.fields}
    for name, part in value.items():
        field = fields.get(str(name)) or kind.fields_by_name.get(str(name))
        if field is None:
            close = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.5)
            meant = f"did you mean {close[0]}?" if close else f"known are {', '.join(fields)}"
            raise JobFormatError(f"{path}.{name}: {meant}")
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"].message_type
            if inner is not None and isinstance(part, Mapping):
                for key, entry in part.items():
                    _check_names(entry, inner, f"{path}.{name}.{key}")
        elif isinstance(part, list):
            for index, entry in enumerate(part):
                _check_names(entry, field.message_type, f"{path}.{name}[{index}]")
        else:
            _check_names(part, field.message_type, f"{path}.{name}")


def _one_line(what: str, error: json_format.ParseError) -> str:
    """Return what is wrong, without the list of all fields that protobuf adds."""
    text = str(error).partition("\n")[0]
    return f"{what}: {text.replace('tinsmith.v1.', '')}"


def _with_text_amounts(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec in which all requests and limits are strings."""

    def visit(value: Any, path: tuple[str, ...]) -> Any:
        if path and path[0] == "method":
            return value
        if isinstance(value, Mapping):
            return {key: visit(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item, path) for item in value]
        is_amount = len(path) > 2 and path[-3] == "resources" and path[-2] in ("requests", "limits")
        return str(value) if is_amount and isinstance(value, int | float) else value

    converted: dict[str, Any] = visit(spec, ())
    return converted
