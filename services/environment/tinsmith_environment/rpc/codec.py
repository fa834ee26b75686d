"""Protobuf to and from the environment domain, and the validation of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping

from google.protobuf import struct_pb2, timestamp_pb2

from tinsmith import names
from tinsmith.rpc.error_codec import encode_code
from tinsmith.tensors import TensorFormatError, decode_tensor
from tinsmith.v1 import environment_pb2, trajectories_pb2
from tinsmith_environment.environment import Action, JsonValue, Observation, StepResult
from tinsmith_environment.instances.instance import InstanceState, InstanceView
from tinsmith_environment.registry import EnvironmentSpec
from tinsmith_runtime.errors import InvalidFieldError, ShapeMismatchError, TinsmithError

DOMAIN = "environment.tinsmith"

_STATES = {
    InstanceState.ACTIVE: environment_pb2.EnvironmentInstance.STATE_ACTIVE,
    InstanceState.FINISHED: environment_pb2.EnvironmentInstance.STATE_FINISHED,
    InstanceState.FAILED: environment_pb2.EnvironmentInstance.STATE_FAILED,
}


def decode_step_index(value: int) -> int:
    """Return a step index.

    Raises:
        InvalidFieldError: If it is negative.
    """
    if value < 0:
        raise InvalidFieldError("step_index", f"must not be negative, got {value}")
    return value


def decode_action(message: trajectories_pb2.Action) -> Action:
    """Return an action.

    Raises:
        InvalidFieldError: If it is empty.
        ShapeMismatchError: If its tokens are not integers of shape [T].
    """
    match message.WhichOneof("content"):
        case "text":
            return Action(text=message.text)
        case "tokens":
            try:
                tokens = decode_tensor(message.tokens)
            except TensorFormatError as error:
                raise ShapeMismatchError("action.tokens", str(error)) from error
            if tokens.ndim != 1 or tokens.dtype.kind != "i":
                raise ShapeMismatchError("action.tokens", "must be int32 or int64 of shape [T]")
            return Action(tokens=tuple(int(token) for token in tokens.tolist()))
        case _:
            raise InvalidFieldError("action", "must hold text or tokens")


def decode_config(message: struct_pb2.Struct) -> dict[str, JsonValue]:
    """Return a config; whole numbers as int, since a Struct knows only doubles."""
    return {key: _decode_value(value) for key, value in message.fields.items()}


def encode_environment(project: str, spec: EnvironmentSpec) -> environment_pb2.Environment:
    """Return the message of an environment."""
    return environment_pb2.Environment(
        name=str(names.EnvironmentName(project, spec.name)),
        description=spec.description,
        default_config=encode_struct(spec.default_config),
    )


def encode_instance(view: InstanceView) -> environment_pb2.EnvironmentInstance:
    """Return the message of an instance."""
    expire_time = timestamp_pb2.Timestamp()
    expire_time.FromDatetime(view.expire_time)
    return environment_pb2.EnvironmentInstance(
        name=str(view.name),
        state=_STATES[view.state],
        observation=encode_observation(view.observation),
        num_steps=view.num_steps,
        expire_time=expire_time,
    )


def encode_observation(observation: Observation) -> trajectories_pb2.Observation:
    """Return the message of an observation."""
    return trajectories_pb2.Observation(
        messages=[
            trajectories_pb2.ChatMessage(role=message.role, content=message.content)
            for message in observation.messages
        ],
        images=[
            trajectories_pb2.ImageChunk(data=image.data, format=image.format)
            for image in observation.images
        ],
    )


def encode_step(result: StepResult) -> environment_pb2.StepInstanceResponse:
    """Return the message of a step result."""
    return environment_pb2.StepInstanceResponse(
        observation=encode_observation(result.observation),
        reward=result.reward,
        done=result.done,
        info=encode_struct(result.info),
    )


def encode_failure(error: TinsmithError) -> environment_pb2.StepFailure:
    """Return the message of a failed step of a stream."""
    return environment_pb2.StepFailure(
        code=encode_code(error.code), reason=error.reason, message=error.message
    )


def encode_struct(values: Mapping[str, JsonValue]) -> struct_pb2.Struct:
    """Return JSON values as a Struct."""
    return struct_pb2.Struct(fields={str(key): _encode_value(v) for key, v in values.items()})


def _encode_value(value: JsonValue) -> struct_pb2.Value:
    if value is None:
        return struct_pb2.Value(null_value=struct_pb2.NULL_VALUE)
    if isinstance(value, bool):
        return struct_pb2.Value(bool_value=value)
    if isinstance(value, int | float):
        return struct_pb2.Value(number_value=value)
    if isinstance(value, str):
        return struct_pb2.Value(string_value=value)
    if isinstance(value, Mapping):
        return struct_pb2.Value(struct_value=encode_struct(value))
    items = struct_pb2.ListValue(values=[_encode_value(item) for item in value])
    return struct_pb2.Value(list_value=items)


def _decode_value(value: struct_pb2.Value) -> JsonValue:
    match value.WhichOneof("kind"):
        case "bool_value":
            return value.bool_value
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidFieldError("config", "must hold finite numbers")
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "struct_value":
            return decode_config(value.struct_value)
        case "list_value":
            return [_decode_value(item) for item in value.list_value.values]
        case _:
            return None
