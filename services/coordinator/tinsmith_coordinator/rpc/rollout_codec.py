"""Messages of rollouts to domain values and back, and the validation of requests."""

from __future__ import annotations

import math
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import json_format

from tinsmith.names import EnvironmentName, RolloutBatchName, SamplingSessionName
from tinsmith.rollouts import (
    EnvironmentTask,
    GroupConfig,
    GroupReport,
    RolloutConfig,
)
from tinsmith.rpc.durations import decode_duration
from tinsmith.rpc.error_codec import encode_status
from tinsmith.types import SamplingParams
from tinsmith.v1 import rollout_pb2, trajectories_pb2
from tinsmith_coordinator.rpc.codec import DOMAIN
from tinsmith_coordinator.store.rollout_records import (
    Batch,
    BatchState,
    BatchUpdate,
    EndedPlay,
    NewBatch,
)
from tinsmith_runtime.errors import (
    EnvironmentNotFoundError,
    InvalidFieldError,
    SamplingSessionNotFoundError,
)
from tinsmith_runtime.rpc.requests import check_text, encode_time, parse_name

GENERATE = "generate"
"""Id of the one operation of a batch."""

_DEFAULTS = GroupConfig()
_MAX_TASKS = 4096
_MAX_CONFIG_BYTES = 64 * 2**10
_MAX_GROUP_SIZE = 1024
_MAX_CONCURRENCY = 1024
_MAX_REPLACEMENTS = 16
_MAX_OVER_SAMPLING = 16.0
_MAX_VALUE = 2**24
_MAX_VERSION = 2**62
_DEFAULT_TIMEOUT_S = 3600.0
_MIN_TIMEOUT_S = 1.0
_MAX_TIMEOUT_S = 86_400.0

_Limits = rollout_pb2.RolloutLimits
_REWRITES = {
    _Limits.HISTORY_REWRITE_UNSPECIFIED: {},
    _Limits.HISTORY_REWRITE_REFUSE: {},
    _Limits.HISTORY_REWRITE_SPLIT_TURNS: {"split_turns": True},
    _Limits.HISTORY_REWRITE_APPEND: {"append_only": True},
}
_LIMITS = ("max_turns", "max_tokens", "max_tokens_per_turn", "max_context_tokens")
_COUNTS = tuple(
    field.name
    for field in rollout_pb2.RolloutReport.DESCRIPTOR.fields
    if field.name.startswith("num_")
)


def decode_new_batch(
    request: rollout_pb2.GenerateRolloutsRequest, project: str, *, seed: int
) -> NewBatch:
    """Return a batch that is asked for, defaults filled in.

    Args:
        request: What is asked for.
        project: Of the caller.
        seed: Used if the request has none, so that the plays are repeatable all the same.

    Raises:
        InvalidFieldError: If a field is out of range.
        SamplingSessionNotFoundError: If the session is of another project.
        EnvironmentNotFoundError: If the environment is.
    """
    session = parse_name(SamplingSessionName, request.sampling_session, "sampling_session")
    if session.project != project:
        raise SamplingSessionNotFoundError(
            f"sampling session {session} does not exist in project {project}",
            sampling_session=session,
        )
    environment = parse_name(EnvironmentName, request.environment, "environment")
    if environment.project != project:
        raise EnvironmentNotFoundError(
            f"environment {environment} does not exist in project {project}",
            environment=environment,
        )
    if not 1 <= len(request.tasks) <= _MAX_TASKS:
        raise InvalidFieldError("tasks", f"must be 1 to {_MAX_TASKS}, got {len(request.tasks)}")
    for index, task in enumerate(request.tasks):
        if task.config.ByteSize() > _MAX_CONFIG_BYTES:
            raise InvalidFieldError(
                f"tasks[{index}].config", f"must be at most {_MAX_CONFIG_BYTES} bytes"
            )
    check_text(request.batch_key, "batch_key")
    for name in ("min_version", "max_staleness"):
        if not 0 <= getattr(request, name) <= _MAX_VERSION:
            raise InvalidFieldError(name, "must not be negative")
    if request.params.HasField("output_format") and request.params.output_format.structural_tag:
        raise InvalidFieldError("params.output_format", "must be a JSON schema or a regex")
    groups = _decode_groups(request.groups, len(request.tasks))
    config = _decode_limits(request.limits)
    timeout_s = _DEFAULT_TIMEOUT_S
    if request.HasField("timeout"):
        timeout_s = decode_duration(request.timeout)
    if not _MIN_TIMEOUT_S <= timeout_s <= _MAX_TIMEOUT_S:
        raise InvalidFieldError("timeout", "must be 1 s to 1 day")
    if not request.params.HasField("seed"):
        request.params.seed = seed
    return NewBatch(
        content=request.SerializeToString(deterministic=True),
        sampling_session=str(session),
        environment=str(environment),
        num_tasks=len(request.tasks),
        groups=groups,
        num_tokens=len(request.tasks) * groups.num_begun_members * config.max_tokens,
        timeout_s=timeout_s,
    )


def decode_config(request: rollout_pb2.GenerateRolloutsRequest) -> RolloutConfig:
    """Return the limits of an episode."""
    return _decode_limits(request.limits)


def decode_tasks(request: rollout_pb2.GenerateRolloutsRequest) -> list[EnvironmentTask]:
    """Return what is played."""
    return [
        EnvironmentTask(task.seed, json_format.MessageToDict(task.config)) for task in request.tasks
    ]


def decode_params(message: trajectories_pb2.SamplingParams) -> SamplingParams:
    """Return how tokens are drawn, as the client's codec writes it."""
    given: dict[str, Any] = {
        name: getattr(message, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "seed",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
        if message.HasField(name)
    }
    if message.HasField("output_format"):
        form = message.output_format.WhichOneof("form")
        if form is not None:
            given[form] = getattr(message.output_format, form)
    if message.HasField("stop_tokens") or message.stop_strings:
        given["stop"] = [*message.stop_strings, *message.stop_tokens.token_ids]
    if message.HasField("stop_tokens"):
        given["keeps_turn_end"] = message.stop_tokens.includes_those_of_model
    return SamplingParams(**given, logit_bias=dict(message.logit_bias))


def encode_operation(batch: Batch, waiting_for: str) -> operations_pb2.Operation:
    """Return a batch as the operation that plays it."""
    metadata = rollout_pb2.GenerateRolloutsMetadata(
        rollout_batch=str(batch.name),
        report=_encode_report(batch.report),
        waiting_for=waiting_for,
        revision=batch.revision,
        create_time=encode_time(batch.create_time_s),
        deadline=encode_time(batch.deadline_s),
    )
    if batch.end_time_s is not None:
        metadata.end_time.CopyFrom(encode_time(batch.end_time_s))
    operation = operations_pb2.Operation(
        name=f"{batch.name}/operations/{GENERATE}", done=batch.state is not BatchState.PLAYING
    )
    operation.metadata.Pack(metadata)
    if batch.failure is not None:
        operation.error.CopyFrom(encode_status(batch.failure, domain=DOMAIN))
    elif batch.state is BatchState.COMPLETED:
        response = rollout_pb2.GenerateRolloutsResponse(
            groups=[
                rollout_pb2.RolloutGroup(task_index=task, member_indices=members)
                for task, members in batch.taken.items()
            ],
            report=_encode_report(batch.report),
        )
        operation.response.Pack(response)
    return operation


def encode_ended(ended: EndedPlay) -> rollout_pb2.RolloutEpisode:
    """Return the message of a play that ended."""
    message = rollout_pb2.RolloutEpisode(
        task_index=ended.play.task,
        member_index=ended.play.member,
        attempt=ended.play.attempt,
        state=rollout_pb2.RolloutEpisode.STATE_FINISHED,
        revision=ended.revision,
    )
    if ended.content:
        message.trajectory.ParseFromString(ended.content)
    if not ended.has_finished:
        message.state = rollout_pb2.RolloutEpisode.STATE_FAILED
        message.failure_reason = ended.reason
        message.failure = ended.problem
    return message


def encode_update(update: BatchUpdate, waiting_for: str) -> rollout_pb2.RolloutUpdate:
    """Return the message of what ended since; the operation is done only with the last one."""
    operation = encode_operation(update.batch, waiting_for)
    if update.revision < update.batch.revision:
        for field in ("error", "response"):
            operation.ClearField(field)
        operation.done = False
    return rollout_pb2.RolloutUpdate(
        operation=operation,
        episodes=[encode_ended(each) for each in update.ended],
        revision=update.revision,
    )


def page_list_name(name: RolloutBatchName) -> str:
    """Return what the tokens of the list of a batch's episodes are tied to."""
    return f"{name}/episodes"


def _decode_groups(message: rollout_pb2.RolloutGroupConfig, num_tasks: int) -> GroupConfig:
    group_size = _in_range(
        message.group_size or _DEFAULTS.group_size, "groups.group_size", 1, _MAX_GROUP_SIZE
    )
    replacements = (
        message.max_replacements
        if message.HasField("max_replacements")
        else _DEFAULTS.max_replacements
    )
    factor = message.over_sampling_factor or _DEFAULTS.over_sampling_factor
    if not (math.isfinite(factor) and 1.0 <= factor <= _MAX_OVER_SAMPLING):
        raise InvalidFieldError(
            "groups.over_sampling_factor", f"must be 1 to {_MAX_OVER_SAMPLING:g}"
        )
    min_size = message.min_group_size or min(_DEFAULTS.min_group_size, group_size)
    return GroupConfig(
        group_size=group_size,
        max_concurrency=_in_range(
            message.max_concurrency or _DEFAULTS.max_concurrency,
            "groups.max_concurrency",
            1,
            _MAX_CONCURRENCY,
        ),
        max_replacements=_in_range(replacements, "groups.max_replacements", 0, _MAX_REPLACEMENTS),
        min_group_size=_in_range(min_size, "groups.min_group_size", 1, group_size),
        num_groups=_in_range(message.num_groups, "groups.num_groups", 0, num_tasks),
        over_sampling_factor=factor,
    )


def _decode_limits(message: rollout_pb2.RolloutLimits) -> RolloutConfig:
    given = {name: getattr(message, name) for name in _LIMITS if getattr(message, name)}
    for name, value in given.items():
        _in_range(value, f"limits.{name}", 1, _MAX_VALUE)
    if message.history_rewrite not in _REWRITES:
        raise InvalidFieldError("limits.history_rewrite", "must be a way to go on")
    return RolloutConfig(**given, **_REWRITES[message.history_rewrite])


def _in_range(value: int, field: str, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidFieldError(field, f"must be {low} to {high}, got {value}")
    return value


def _encode_report(report: GroupReport) -> rollout_pb2.RolloutReport:
    return rollout_pb2.RolloutReport(
        **{name: getattr(report, name) for name in _COUNTS},
        failures=dict(report.failures),
        last_failure=check_length(report.last_failure),
    )


def check_length(text: str) -> str:
    """Return the beginning of a text that an environment may have written."""
    return text[:1024]
