"""Protobuf to domain values and back, and the validation of requests.

Nothing here quotes a value that a client sent at full length: an error travels in HTTP/2 headers,
which are short.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TypeVar

from google.longrunning import operations_pb2
from google.protobuf.message import Message
from google.rpc import status_pb2

from tinsmith.errors import InvalidArgumentError
from tinsmith.names import (
    CheckpointName,
    ProjectName,
    RunName,
    SessionName,
    is_valid_id,
)
from tinsmith.rpc.durations import decode_duration, encode_duration
from tinsmith.rpc.error_codec import encode_status
from tinsmith.text.chat_template import check_syntax
from tinsmith.v1 import audit_pb2, keys_pb2, models_pb2, scheduler_pb2, trainer_pb2
from tinsmith_runtime.adapters import AdapterConfig, FullConfig, LoraConfig
from tinsmith_runtime.errors import InvalidFieldError, TinsmithError
from tinsmith_runtime.records import AuditEvent
from tinsmith_runtime.rpc import adapter_codec
from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.pod_identity import POD_KEY_PREFIX
from tinsmith_runtime.rpc.requests import (
    check_text,
    decode_chosen_id,
    decode_history_retention,
    decode_labels,
    decode_page_size,
    decode_time,
    encode_time,
    parse_name,
)
from tinsmith_scheduler.store.records import (
    Fork,
    Key,
    KeyState,
    ListedRun,
    ModelOffer,
    NewRun,
    NewSession,
    PageRequest,
    ResumedRun,
    Run,
    RunActivity,
    RunState,
    Session,
    SessionState,
    TimeWindow,
)

DOMAIN = "scheduler.tinsmith"

MAX_TEMPLATE_CHARACTERS = 65_536
"""Longest chat template of a run's own."""
MAX_TEMPLATE_ENDS = 8
"""Tokens that end an answer by a run's own chat template."""
_MAX_RANK = 128
_MAX_MODEL_NAME = 256
_MAX_KEY_TTL_S = 10 * 365.25 * 24 * 3600.0
_MAX_WAIT_S = 20.0

_SESSION_STATES = {
    each: scheduler_pb2.Session.State.Value(f"STATE_{each.name}") for each in SessionState
}
_RUN_STATES = {
    each: scheduler_pb2.TrainingRun.State.Value(f"STATE_{each.name}") for each in RunState
}
_ACTIVITIES = {
    None: scheduler_pb2.TrainingRun.ACTIVITY_UNSPECIFIED,
    RunActivity.TRAINING: scheduler_pb2.TrainingRun.ACTIVITY_TRAINING,
    RunActivity.WAITING: scheduler_pb2.TrainingRun.ACTIVITY_WAITING,
    RunActivity.FINISHED: scheduler_pb2.TrainingRun.ACTIVITY_FINISHED,
    RunActivity.IDLE: scheduler_pb2.TrainingRun.ACTIVITY_IDLE,
}
_KEY_STATES = {
    KeyState.ACTIVE: keys_pb2.Key.STATE_ACTIVE,
    KeyState.REVOKED: keys_pb2.Key.STATE_REVOKED,
}


def decode_new_session(request: scheduler_pb2.CreateSessionRequest) -> NewSession:
    """Return the session that is asked for."""
    return NewSession(
        project=parse_name(ProjectName, request.parent, "parent").project,
        display_name=check_text(request.display_name, "display_name"),
        labels=decode_labels(request.labels),
        client_version=check_text(request.client_version, "client_version"),
    )


def decode_new_run(
    request: scheduler_pb2.CreateTrainingRunRequest, *, max_history_s: float
) -> NewRun:
    """Return the run that is asked for, defaults filled in."""
    fork = _decode_fork(request)
    source: CheckpointName | None = None
    if request.source_checkpoint:
        source = parse_name(CheckpointName, request.source_checkpoint, "source_checkpoint")
    elif request.include_optimizer:
        raise InvalidFieldError("include_optimizer", "needs a source_checkpoint")
    is_named = bool(request.base_model) or (source is None and fork is None)
    return NewRun(
        session=parse_name(SessionName, request.parent, "parent"),
        base_model=decode_base_model(request.base_model, "base_model") if is_named else "",
        adapter=decode_adapter(request.adapter),
        display_name=check_text(request.display_name, "display_name"),
        labels=decode_labels(request.labels),
        source=source,
        fork=fork,
        include_optimizer=request.include_optimizer,
        given_adapter_fields=(
            frozenset(field.name for field, _ in request.adapter.lora.ListFields())
            if request.adapter.WhichOneof("kind") is not None
            else None
        ),
        chosen_id=decode_chosen_id(request.training_run_id, "training_run_id"),
        history_retention_s=decode_history_retention(request, max_s=max_history_s),
    )


def decode_run_update(
    request: scheduler_pb2.UpdateTrainingRunRequest, *, max_history_s: float
) -> float:
    """Return for how long the past of a run is to be kept, all that can be changed of a run.

    Raises:
        InvalidFieldError: If it changes nothing or something else, or the time is out of range.
    """
    if list(request.update_mask.paths) != ["history_retention"]:
        raise InvalidFieldError("update_mask", "must name history_retention, and nothing else")
    return decode_history_retention(request, max_s=max_history_s)


def decode_last_operation(request: scheduler_pb2.FinishTrainingRunRequest) -> int:
    """Return the number of the last operation of a training, 0 if it had none."""
    if not request.HasField("sequence_number"):
        raise InvalidFieldError("sequence_number", "is required; 0 if there was no operation")
    if request.sequence_number < 0:
        raise InvalidFieldError("sequence_number", "must not be negative")
    return request.sequence_number


def _decode_fork(request: scheduler_pb2.CreateTrainingRunRequest) -> Fork | None:
    """Return the moment of a run that is to be forked, if one is named."""
    if not request.source_run:
        for field in ("source_step", "reruns_step"):
            if getattr(request, field):
                raise InvalidFieldError(field, "needs a source_run")
        return None
    for field in ("base_model", "source_checkpoint", "include_optimizer"):
        if getattr(request, field):
            raise InvalidFieldError(field, "excludes source_run; leave it out")
    if request.adapter.ByteSize():
        raise InvalidFieldError("adapter", "is that of source_run; leave it out")
    if not request.HasField("source_step"):
        raise InvalidFieldError("source_step", "is required with source_run")
    if request.source_step < 0:
        raise InvalidFieldError("source_step", f"must be at least 0, got {request.source_step}")
    run = parse_name(RunName, request.source_run, "source_run")
    return Fork(run, request.source_step, request.reruns_step)


def decode_adapter(message: models_pb2.AdapterConfig) -> AdapterConfig:
    """Return what is trained: a LoRA of rank 32 unless told otherwise."""
    _check_template(message)
    if message.WhichOneof("kind") is None:
        return LoraConfig(
            chat_template=message.chat_template, stop_token_ids=tuple(message.stop_token_ids)
        )
    adapter = adapter_codec.decode_adapter(message)
    if isinstance(adapter, FullConfig):
        return adapter
    if not 1 <= adapter.rank <= _MAX_RANK:
        raise InvalidFieldError(
            "adapter.lora.rank", f"must be 1 to {_MAX_RANK}, got {adapter.rank}"
        )
    if not (math.isfinite(adapter.alpha) and adapter.alpha > 0):
        raise InvalidFieldError(
            "adapter.lora.alpha", f"must be positive and finite, got {adapter.alpha}"
        )
    if not (adapter.train_attention or adapter.train_mlp or adapter.train_unembedding):
        raise InvalidFieldError("adapter.lora", "must train attention, MLP or unembedding")
    return adapter


def _check_template(message: models_pb2.AdapterConfig) -> None:
    """Refuse a template that cannot be read. It is a stranger's program, and is not run here."""
    num_characters = len(message.chat_template)
    if num_characters > MAX_TEMPLATE_CHARACTERS:
        raise InvalidFieldError(
            "adapter.chat_template",
            f"must have at most {MAX_TEMPLATE_CHARACTERS} characters, got {num_characters}",
        )
    if len(message.stop_token_ids) > MAX_TEMPLATE_ENDS:
        raise InvalidFieldError(
            "adapter.stop_token_ids", f"must be at most {MAX_TEMPLATE_ENDS} tokens"
        )
    if any(token < 0 for token in message.stop_token_ids):
        raise InvalidFieldError("adapter.stop_token_ids", "must be 0 or more each")
    if message.stop_token_ids and not message.chat_template:
        raise InvalidFieldError("adapter.stop_token_ids", "need a chat_template, which they end")
    try:
        check_syntax(message.chat_template)
    except InvalidArgumentError as error:
        raise InvalidFieldError("adapter.chat_template", error.message) from error


def decode_base_model(value: str, field: str) -> str:
    """Return the name of a base model."""
    if not value:
        raise InvalidFieldError(field, "is required")
    if len(value) > _MAX_MODEL_NAME:
        raise InvalidFieldError(field, f"must have at most {_MAX_MODEL_NAME} characters")
    return value


def decode_page(size: int, token: str) -> PageRequest:
    """Return which part of a list is asked for."""
    return PageRequest(decode_page_size(size), token)


def decode_key_role(role: str) -> KeyRole:
    """Return the role that a key is to have; that of a member by default."""
    try:
        return KeyRole(role or KeyRole.MEMBER)
    except ValueError as error:
        raise InvalidFieldError("role", f"must be one of {', '.join(KeyRole)}") from error


def decode_key_ttl_s(request: keys_pb2.CreateKeyRequest) -> float | None:
    """Return how long a key is good for; None for ever."""
    if not request.HasField("ttl"):
        return None
    ttl_s = decode_duration(request.ttl)
    if not 0 < ttl_s <= _MAX_KEY_TTL_S:
        raise InvalidFieldError("ttl", "must be more than 0 s and at most 10 years")
    return ttl_s


def decode_key_lookup(request: keys_pb2.VerifyKeyRequest) -> tuple[str, bytes]:
    """Return the public part and the hash of a key that is asked about."""
    if len(request.secret_sha256) not in (0, hashlib.sha256().digest_size):
        raise InvalidFieldError("secret_sha256", "must be 32 bytes, or left out")
    # The id of a pod's key is read where it is verified.
    if not request.key_id.startswith(POD_KEY_PREFIX) and not is_valid_id(request.key_id):
        raise InvalidFieldError("key_id", "is not the id of a key")
    return request.key_id, request.secret_sha256


def decode_wait_s(request: operations_pb2.WaitOperationRequest) -> float:
    """Return how long to wait, 20 s at most and by default."""
    if not request.HasField("timeout"):
        return _MAX_WAIT_S
    return min(max(decode_duration(request.timeout), 0.0), _MAX_WAIT_S)


def encode_session(
    session: Session, *, heartbeat_interval_s: float, timeout_s: float
) -> scheduler_pb2.Session:
    """Return the message of a session."""
    return scheduler_pb2.Session(
        name=session.name,
        state=_SESSION_STATES[session.state],
        display_name=session.display_name,
        labels=session.labels,
        heartbeat_interval=encode_duration(heartbeat_interval_s),
        heartbeat_timeout=encode_duration(timeout_s),
        create_time=encode_time(session.create_time_s),
        outcome=session.outcome,
    )


def encode_run(
    run: Run, *, trainer_address: str, checkpoint_address: str, waiting_for: str = ""
) -> scheduler_pb2.TrainingRun:
    """Return the message of a run."""
    return scheduler_pb2.TrainingRun(
        name=run.name,
        state=_RUN_STATES[run.state],
        session=run.session,
        base_model=run.base_model,
        adapter=adapter_codec.encode_adapter(run.adapter),
        display_name=run.display_name,
        labels=run.labels,
        trainer_address=trainer_address,
        waiting_for=waiting_for,
        worker=run.worker,
        epoch=run.epoch,
        create_time=encode_time(run.create_time_s),
        source_checkpoint=run.source_checkpoint,
        checkpoint_address=checkpoint_address,
        source_run=run.source_run,
        source_step=run.source_step,
        rerun_sequence_number=run.rerun_from,
        history_retention=encode_duration(run.history_s),
        finish_time=None if run.finish_time_s is None else encode_time(run.finish_time_s),
    )


def encode_listed_run(
    listed: ListedRun, *, run: scheduler_pb2.TrainingRun
) -> scheduler_pb2.TrainingRun:
    """Add to the message of a run what a list says of it, and return it."""
    run.session_ended = listed.session_ended
    run.activity = _ACTIVITIES[listed.activity]
    if listed.standing is not None:
        run.num_pending_operations = listed.standing.num_pending
        run.replay_diverged = listed.standing.has_diverged
        run.waiting_for = run.waiting_for or listed.standing.waiting_for
    return run


def encode_creation(
    run: Run,
    *,
    trainer_address: str,
    checkpoint_address: str,
    waiting_for: str,
    closed: TinsmithError,
) -> operations_pb2.Operation:
    """Return the operation that creates a run.

    Args:
        run: As it stands.
        trainer_address: `host:port` of its trainer; empty if that is not alive.
        checkpoint_address: Of a trainer that answers for its checkpoints; empty if there is none.
        waiting_for: What an unfinished creation waits for.
        closed: The error to answer with if the run was deleted.
    """
    is_waiting = run.state is RunState.CREATING
    operation = operations_pb2.Operation(name=f"{run.name}/operations/create", done=not is_waiting)
    operation.metadata.Pack(
        scheduler_pb2.CreateTrainingRunMetadata(
            run=run.name, waiting_for=waiting_for if is_waiting else ""
        )
    )
    if run.state in (RunState.ACTIVE, RunState.MOVING):
        operation.response.Pack(
            encode_run(run, trainer_address=trainer_address, checkpoint_address=checkpoint_address)
        )
    elif run.state is RunState.FAILED:
        operation.error.CopyFrom(status_pb2.Status.FromString(run.encoded_error))
    elif run.state is RunState.DELETED:
        operation.error.CopyFrom(encode_status(closed, domain=DOMAIN))
    return operation


def encode_resumed_run(
    resumed: ResumedRun, *, run: scheduler_pb2.TrainingRun
) -> scheduler_pb2.ResumedRun:
    """Return the message of a run that goes on."""
    return scheduler_pb2.ResumedRun(
        run=run, status=trainer_pb2.RunStatus.FromString(resumed.encoded_status)
    )


def encode_error(error: TinsmithError) -> bytes:
    """Return the stored form of an error."""
    encoded: bytes = encode_status(error, domain=DOMAIN).SerializeToString()
    return encoded


def decode_window(request: scheduler_pb2.ListAuditEventsRequest) -> TimeWindow:
    """Return the span of time that is asked about."""
    return TimeWindow(
        start_s=decode_time(request.start_time) if request.HasField("start_time") else None,
        end_s=decode_time(request.end_time) if request.HasField("end_time") else None,
    )


def encode_audit_event(event: AuditEvent) -> audit_pb2.AuditEvent:
    """Return the message of a management action."""
    return audit_pb2.AuditEvent(
        time=encode_time(event.time_s),
        action=event.action,
        resource=event.resource,
        key_id=event.key_id,
    )


def encode_key(key: Key, *, name: str, api_key: ApiKey | None = None) -> keys_pb2.Key:
    """Return the message of a key; with its secret in both spellings if that is given."""
    return keys_pb2.Key(
        name=name,
        state=_KEY_STATES[key.state],
        role=key.role,
        display_name=key.display_name,
        create_time=encode_time(key.create_time_s),
        expire_time=encode_time(key.expire_time_s) if key.expire_time_s is not None else None,
        secret=str(api_key or ""),
        pool=key.pool,
        tinker_secret=api_key.tinker_spelling if api_key is not None else "",
    )


def encode_offer(offer: ModelOffer) -> scheduler_pb2.ServedModel:
    """Return the message of a base model that is served."""
    return scheduler_pb2.ServedModel(
        model=models_pb2.ModelCapabilities.FromString(offer.encoded_model),
        trainable=offer.is_trainable,
        sampleable=offer.is_sampleable,
        num_runs=offer.num_runs,
        max_runs=offer.max_runs,
    )


ValueT = TypeVar("ValueT")


def serialized(encode: Callable[[ValueT], Message]) -> Callable[[ValueT], bytes]:
    """Return an encoder that goes all the way to bytes."""
    return lambda value: encode(value).SerializeToString()
