"""Protobuf to and from the environment domain, and the validation of requests."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping

from google.protobuf import struct_pb2, timestamp_pb2

from tinsmith import names
from tinsmith.environments.observation_codec import encode_action_kinds, encode_observation
from tinsmith.rpc.error_codec import encode_code
from tinsmith.tensors import TensorFormatError, decode_tensor
from tinsmith.text.tool_notations import is_function_name
from tinsmith.v1 import environment_pb2, trajectories_pb2
from tinsmith_environment.environment import Action, JsonValue, StepResult, ToolCall
from tinsmith_environment.instances.instance import InstanceState, InstanceView, NewInstance
from tinsmith_environment.instances.statistics import JobStatistics, StatisticsKey
from tinsmith_environment.registry import EnvironmentSpec
from tinsmith_runtime.errors import InvalidFieldError, ShapeMismatchError, TinsmithError

DOMAIN = "environment.tinsmith"
MAX_BATCH_STEPS = 256
"""Steps, or results, of one message of a stream."""

_MAX_JOB_CHARACTERS = 63

_MAX_TOOL_CALLS = 128

_STATES = {
    each: environment_pb2.EnvironmentInstance.State.Value(f"STATE_{each.name}")
    for each in InstanceState
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
            return Action(text=message.text, tool_calls=_decode_calls(message))
        case "tokens":
            if message.tool_calls:
                raise InvalidFieldError("action.tool_calls", "must be empty beside tokens")
            try:
                tokens = decode_tensor(message.tokens)
            except TensorFormatError as error:
                raise ShapeMismatchError("action.tokens", str(error)) from error
            if tokens.ndim != 1 or tokens.dtype.kind != "i":
                raise ShapeMismatchError("action.tokens", "must be int32 or int64 of shape [T]")
            return Action(tokens=tuple(int(token) for token in tokens.tolist()))
        case _:
            raise InvalidFieldError("action", "must hold text or tokens")


def _decode_calls(message: trajectories_pb2.Action) -> tuple[ToolCall, ...]:
    calls = tuple(ToolCall(call.name, call.arguments_json, call.id) for call in message.tool_calls)
    if len(calls) > _MAX_TOOL_CALLS:
        raise InvalidFieldError(
            "action.tool_calls", f"has {len(calls)} calls, at most {_MAX_TOOL_CALLS} may be"
        )
    for index, call in enumerate(calls):
        if not is_function_name(call.name):
            raise InvalidFieldError(f"action.tool_calls[{index}].name", "is no name of a tool")
        try:
            call.read_arguments()
        except (ValueError, RecursionError) as error:
            raise InvalidFieldError(
                f"action.tool_calls[{index}].arguments_json", "is no JSON object"
            ) from error
    return calls


def decode_config(message: struct_pb2.Struct) -> dict[str, JsonValue]:
    """Return a config; whole numbers as int, since a Struct knows only doubles."""
    return {key: _decode_value(value) for key, value in message.fields.items()}


def decode_new_instance(
    name: names.EnvironmentName, request: environment_pb2.CreateInstanceRequest
) -> NewInstance:
    """Return what a request wishes for.

    Raises:
        InvalidFieldError: If a field is not valid.
    """
    return NewInstance(
        project=name.project,
        environment=name.environment,
        seed=request.seed,
        config=decode_config(request.config),
        client_id=decode_client_id(request.client_id) if request.client_id else "",
        job=decode_job(request.job),
    )


def decode_client_id(value: str) -> str:
    """Return the id of a client.

    Raises:
        InvalidFieldError: If it is none.
    """
    try:
        return str(uuid.UUID(value))
    except ValueError as error:
        raise InvalidFieldError("client_id", f"must be a UUID, got {value!r:.64}") from error


def decode_job(value: str) -> str:
    """Return the name of a job; empty for none.

    Raises:
        InvalidFieldError: If it is too long.
    """
    if len(value) > _MAX_JOB_CHARACTERS:
        raise InvalidFieldError(
            "job", f"must have at most {_MAX_JOB_CHARACTERS} characters, got {len(value)}"
        )
    return value


def encode_statistics(
    key: StatisticsKey, statistics: JobStatistics
) -> environment_pb2.EnvironmentStatistics:
    """Return the message of what the episodes of a job came to."""
    start_time = timestamp_pb2.Timestamp()
    start_time.FromDatetime(statistics.start_time)
    return environment_pb2.EnvironmentStatistics(
        environment=str(names.EnvironmentName(key.project, key.environment)),
        job=key.job,
        num_episodes=statistics.num_episodes,
        num_finished=statistics.num_finished,
        num_abandoned=statistics.num_abandoned,
        num_failures=statistics.num_failures,
        num_steps=statistics.num_steps,
        step_time_p50_seconds=statistics.step_time_s(0.5),
        step_time_p99_seconds=statistics.step_time_s(0.99),
        mean_reward=statistics.mean_reward,
        start_time=start_time,
    )


def encode_environment(project: str, spec: EnvironmentSpec) -> environment_pb2.Environment:
    """Return the message of an environment."""
    return environment_pb2.Environment(
        name=str(names.EnvironmentName(project, spec.name)),
        description=spec.description,
        default_config=encode_struct(spec.default_config),
        builtin=spec.is_builtin,
        action_kinds=encode_action_kinds(spec.action_kinds),
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
        max_batch_steps=MAX_BATCH_STEPS,
        action_kinds=encode_action_kinds(view.action_kinds),
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
