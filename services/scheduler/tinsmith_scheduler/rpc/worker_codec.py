"""Protobuf to domain values and back, for workers and what they hold."""

from __future__ import annotations

from tinsmith.names import (
    CheckpointName,
    ProjectName,
    RunName,
    SessionName,
    WorkerName,
    serving_pool,
)
from tinsmith.rpc.durations import encode_duration
from tinsmith.v1 import models_pb2, scheduler_pb2, workers_pb2
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.rpc.requests import check_text, decode_chosen_id, parse_name
from tinsmith_scheduler.rpc.codec import decode_base_model
from tinsmith_scheduler.runs.sampling_sessions import LocatedSession
from tinsmith_scheduler.store.records import (
    NewSamplingSession,
    SamplerLoad,
    ServedModel,
    TokenizerFiles,
    Worker,
    WorkerRole,
)

_ROLES = {workers_pb2.Worker.Role.Value(f"ROLE_{each.name}"): each for each in WorkerRole}
_ROLE_NUMBERS = {role: number for number, role in _ROLES.items()}


def decode_worker(message: workers_pb2.Worker) -> Worker:
    """Return the worker that registers."""
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidFieldError(
            "worker.role", "must be trainer, sampler, environment or coordinator"
        )
    if not message.address.rpartition(":")[2].isdigit():
        raise InvalidFieldError("worker.address", "must be host:port")
    if role is WorkerRole.TRAINER and message.max_runs <= 0:
        raise InvalidFieldError("worker.max_runs", "must be positive for a trainer")
    is_serving = role is WorkerRole.SAMPLER and message.pool == serving_pool(message.project)
    if message.project and not is_serving:
        raise InvalidFieldError(
            "worker.project", f"is for samplers of the pool {serving_pool(message.project)}"
        )
    if message.checkpoint and not message.project:
        raise InvalidFieldError("worker.checkpoint", "needs worker.project")
    return Worker(
        name=str(parse_name(WorkerName, message.name, "worker.name")),
        role=role,
        address=message.address,
        models=tuple(
            ServedModel(
                decode_base_model(model.base_model, "worker.models.base_model"),
                model.SerializeToString(),
            )
            for model in message.models
        ),
        max_runs=message.max_runs,
        incarnation=check_text(message.incarnation, "worker.incarnation"),
        ledger=check_text(message.ledger, "worker.ledger"),
        pool=check_text(message.pool, "worker.pool"),
        project=(
            parse_name(ProjectName, f"projects/{message.project}", "worker.project").project
            if message.project
            else ""
        ),
        checkpoint=(
            str(parse_name(CheckpointName, message.checkpoint, "worker.checkpoint"))
            if message.checkpoint
            else ""
        ),
    )


def decode_load(message: scheduler_pb2.SamplerLoad) -> SamplerLoad:
    """Return what a sampler has to do."""
    for name in ("num_requests", "num_sequences", "num_tokens"):
        if getattr(message, name) < 0:
            raise InvalidFieldError(f"load.{name}", "must not be negative")
    return SamplerLoad(message.num_requests, message.num_sequences, message.num_tokens)


def decode_role(request: workers_pb2.ListWorkersRequest) -> WorkerRole | None:
    """Return the role that is asked about; None for all of them."""
    if request.role == workers_pb2.Worker.ROLE_UNSPECIFIED:
        return None
    role = _ROLES.get(request.role)
    if role is None:
        raise InvalidFieldError("role", "is not a role that this release knows")
    return role


def encode_listed_worker(worker: Worker, *, heartbeat_interval_s: float) -> workers_pb2.Worker:
    """Return the message of a worker with its base models."""
    message = encode_worker(worker, heartbeat_interval_s=heartbeat_interval_s)
    message.models.extend(
        models_pb2.ModelCapabilities.FromString(model.encoded_model) for model in worker.models
    )
    return message


def encode_worker(worker: Worker, *, heartbeat_interval_s: float) -> workers_pb2.Worker:
    """Return the message of a worker; its models are left out."""
    return workers_pb2.Worker(
        name=worker.name,
        role=_ROLE_NUMBERS[worker.role],
        address=worker.address,
        max_runs=worker.max_runs,
        incarnation=worker.incarnation,
        ledger=worker.ledger,
        pool=worker.pool,
        project=worker.project,
        checkpoint=worker.checkpoint,
        heartbeat_interval=encode_duration(heartbeat_interval_s),
    )


def decode_tokenizers(request: workers_pb2.RegisterWorkerRequest) -> dict[str, TokenizerFiles]:
    """Return the tokenizers of a worker by base model."""
    tokenizers = {}
    for base_model, message in request.tokenizers.items():
        if not message.digest:
            raise InvalidFieldError("tokenizers.digest", "is required")
        tokenizers[base_model] = TokenizerFiles(message.digest, dict(message.files))
    return tokenizers


def encode_tokenizer(tokenizer: TokenizerFiles, *, known_digest: str) -> scheduler_pb2.Tokenizer:
    """Return the message of a tokenizer; without files if the client holds them already."""
    files = {} if tokenizer.digest == known_digest else tokenizer.files
    return scheduler_pb2.Tokenizer(digest=tokenizer.digest, files=files)


def decode_new_sampling_session(
    request: scheduler_pb2.CreateSamplingSessionRequest,
) -> NewSamplingSession:
    """Return the handle that is asked for."""
    session = parse_name(SessionName, request.parent, "parent")
    chosen_id = decode_chosen_id(request.sampling_session_id, "sampling_session_id")
    source = request.WhichOneof("source")
    if source == "base_model":
        base_model = decode_base_model(request.base_model, "base_model")
        return NewSamplingSession(session, base_model=base_model, chosen_id=chosen_id)
    if source == "checkpoint":
        checkpoint = parse_name(CheckpointName, request.checkpoint, "checkpoint")
        return NewSamplingSession(session, checkpoint=checkpoint, chosen_id=chosen_id)
    if source == "run":
        run = parse_name(RunName, request.run, "run")
        return NewSamplingSession(session, run=run, chosen_id=chosen_id)
    raise InvalidFieldError("source", "is required: base_model, checkpoint or run")


def encode_sampling_session(located: LocatedSession) -> scheduler_pb2.SamplingSession:
    """Return the message of a handle."""
    session, adapter = located.session, located.adapter
    return scheduler_pb2.SamplingSession(
        name=session.name,
        session=session.session,
        base_model=session.base_model,
        checkpoint=session.checkpoint,
        run=session.run,
        pool=session.pool,
        sampler_addresses=located.sampler_addresses,
        trainer_address=located.trainer_address,
        chat_template="" if adapter is None else adapter.chat_template,
        stop_token_ids=() if adapter is None else adapter.stop_token_ids,
        sampler_loads=[
            scheduler_pb2.SamplerLoad(
                address=address,
                num_requests=load.num_requests,
                num_sequences=load.num_sequences,
                num_tokens=load.num_tokens,
                age=encode_duration(load.age_s),
            )
            for address, load in located.sampler_loads.items()
        ],
    )
