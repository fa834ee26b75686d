"""Protobuf to and from the trainer's domain, and the validation of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.longrunning import operations_pb2
from google.protobuf.message import Message
from google.rpc import status_pb2

from tinsmith import names
from tinsmith.rpc.error_codec import encode_status
from tinsmith.tensors import encode_tensor
from tinsmith.v1 import checkpoint_pb2, trainer_pb2, trajectories_pb2
from tinsmith_engine import (
    AdamParams,
    BatchResult,
    Datum,
    OptimStepResult,
    validate_adam,
)
from tinsmith_engine.contract.codec import (
    decode_array,
    decode_input,
)
from tinsmith_runtime.adapters import adapter_from_json
from tinsmith_runtime.errors import (
    EmptyBatchError,
    InvalidFieldError,
    MissingLossInputError,
    TinsmithError,
)
from tinsmith_runtime.ledger import (
    CheckpointRecord,
    OperationRecord,
    OperationState,
    StoredFile,
    TaskRecord,
)
from tinsmith_runtime.rpc.adapter_codec import encode_adapter
from tinsmith_runtime.rpc.requests import (
    decode_chosen_id,
    decode_labels,
    decode_ttl,
    digest_of,
    encode_time,
    given_fields,
    parse_name,
)
from tinsmith_runtime.storage.checkpoint_manifests import manifest_uri
from tinsmith_trainer.execution.operation_status import OperationStatus
from tinsmith_trainer.runs.operations import (
    ForwardWork,
    Kind,
    LoadCheckpointWork,
    LoadResult,
    OptimStepWork,
    Result,
    SaveCheckpointWork,
    Submission,
    Work,
)

DOMAIN = "trainer.tinsmith"

_REQUESTS: dict[Kind, type[Message]] = {
    Kind.FORWARD: trainer_pb2.ForwardRequest,
    Kind.FORWARD_BACKWARD: trainer_pb2.ForwardBackwardRequest,
    Kind.OPTIM_STEP: trainer_pb2.OptimStepRequest,
    Kind.SAVE_CHECKPOINT: trainer_pb2.SaveCheckpointRequest,
    Kind.LOAD_CHECKPOINT: trainer_pb2.LoadCheckpointRequest,
}
_RESPONSES: dict[str, type[Message]] = {
    Kind.FORWARD: trainer_pb2.ForwardResponse,
    Kind.FORWARD_BACKWARD: trainer_pb2.ForwardBackwardResponse,
    Kind.OPTIM_STEP: trainer_pb2.OptimStepResponse,
    Kind.SAVE_CHECKPOINT: checkpoint_pb2.Checkpoint,
    Kind.LOAD_CHECKPOINT: trainer_pb2.LoadCheckpointResponse,
}
_CHECKPOINT_KINDS = {
    checkpoint_pb2.Checkpoint.KIND_TRAINING: "training",
    checkpoint_pb2.Checkpoint.KIND_SAMPLER: "sampler",
}
_WIRE_CHECKPOINT_KINDS = {kind: wire for wire, kind in _CHECKPOINT_KINDS.items()}
ALL_RUNS_SUFFIX = "/trainingRuns/-"


def decode_submission(
    kind: Kind, run: names.RunName, request: Any, body: bytes, *, key_id: str = ""
) -> Submission:
    """Return the envelope of an ordered call; the request id is not checked yet.

    Args:
        kind: What is asked for.
        run: The run that it is about.
        request: The message.
        body: The bytes that it came as. They are stored and hashed as they are.
        key_id: The key that it is charged to.

    Raises:
        InvalidFieldError: If the sequence number is not valid, so that none can be consumed.
    """
    if request.sequence_number < 1:
        raise InvalidFieldError(
            "sequence_number", f"must be at least 1, got {request.sequence_number}"
        )
    return Submission(
        run=str(run),
        kind=kind,
        sequence_number=request.sequence_number,
        request_id=request.request_id,
        digest=digest_of(body),
        payload=body,
        key_id=key_id,
    )


def decode_work(kind: Kind, request: Any) -> Work:
    """Return what an ordered call asks for.

    Raises:
        TinsmithError: If a field is missing, malformed or out of range.
    """
    match kind:
        case Kind.FORWARD | Kind.FORWARD_BACKWARD:
            return _decode_forward(request, is_backward=kind is Kind.FORWARD_BACKWARD)
        case Kind.OPTIM_STEP:
            return _decode_optim_step(request)
        case Kind.SAVE_CHECKPOINT:
            return _decode_save(request)
        case Kind.LOAD_CHECKPOINT:
            name = parse_name(names.CheckpointName, request.checkpoint, "checkpoint")
            return LoadCheckpointWork(str(name), request.include_optimizer)


def decode_all_runs(parent: str) -> names.ProjectName:
    """Return the project whose runs `projects/{project}/trainingRuns/-` stands for.

    Raises:
        InvalidFieldError: If it is no such name.
    """
    return parse_name(names.ProjectName, parent.removesuffix(ALL_RUNS_SUFFIX), "parent")


class StoredCodec:
    """Requests and results as the ledger stores them; implements `WireCodec`.

    Args:
        store_uri: Of the store that results are written to.
    """

    def __init__(self, store_uri: str) -> None:
        self._store_uri = store_uri

    def decode_work(self, kind: Kind, payload: bytes) -> Work:
        """Return the work of a stored request."""
        request = _REQUESTS[kind]()
        request.ParseFromString(payload)
        return decode_work(kind, request)

    def encode_result(self, kind: Kind, result: Result) -> bytes:
        """Return the serialised response."""
        encoded: bytes = _encode_result(kind, result, self._store_uri).SerializeToString(
            deterministic=True
        )
        return encoded

    def decode_load(self, result: bytes) -> LoadResult:
        """Return what a serialised `LoadCheckpointResponse` says."""
        return LoadResult(trainer_pb2.LoadCheckpointResponse.FromString(result).version)

    def encode_error(self, error: TinsmithError) -> bytes:
        """Return the serialised status."""
        status: bytes = encode_status(error, domain=DOMAIN).SerializeToString(deterministic=True)
        return status


def encode_operation(record: OperationRecord, status: OperationStatus) -> operations_pb2.Operation:
    """Return the message of an operation."""
    states = trainer_pb2.OperationMetadata
    state = {
        OperationState.SUCCEEDED: states.STATE_SUCCEEDED,
        OperationState.FAILED: states.STATE_FAILED,
        OperationState.PENDING: states.STATE_QUEUED,
    }[record.state]
    if record.state is OperationState.PENDING and (status.is_running or status.is_held):
        state = states.STATE_RUNNING if status.is_running else states.STATE_HELD
    metadata = trainer_pb2.OperationMetadata(
        run=record.run,
        sequence_number=record.sequence_number,
        kind=record.kind,
        state=state,
        waiting_for=status.waiting_for,
        submit_time=encode_time(record.submit_time_s),
        finish_time=encode_time(record.finish_time_s) if record.finish_time_s else None,
        num_attempts=record.num_attempts,
        revision=record.revision,
        queue_position=status.position,
        num_tokens_ahead=status.num_tokens_ahead,
    )
    operation = operations_pb2.Operation(
        name=f"{record.run}/operations/{record.sequence_number}",
        done=record.state is not OperationState.PENDING,
    )
    operation.metadata.Pack(metadata)
    put_outcome(operation, record, _RESPONSES)
    return operation


def put_outcome(
    operation: operations_pb2.Operation,
    record: OperationRecord | TaskRecord,
    responses: Mapping[str, type[Message]],
) -> None:
    """Put the result or error of what has ended into its message; responses are by kind."""
    if record.state is OperationState.SUCCEEDED:
        response_type = responses[record.kind].DESCRIPTOR.full_name
        operation.response.type_url = f"type.googleapis.com/{response_type}"
        operation.response.value = record.result or b""
    elif record.state is OperationState.FAILED:
        operation.error.CopyFrom(status_pb2.Status.FromString(record.error or b""))


def encode_checkpoint(record: CheckpointRecord, store_uri: str) -> checkpoint_pb2.Checkpoint:
    """Return the message of a checkpoint in the store of this URI."""
    return checkpoint_pb2.Checkpoint(
        name=record.name,
        kind=_WIRE_CHECKPOINT_KINDS[record.kind],
        base_model=record.base_model,
        adapter=encode_adapter(adapter_from_json(record.adapter)),
        version=record.version,
        sequence_number=record.sequence_number,
        size_bytes=record.size_bytes,
        manifest_uri=manifest_uri(store_uri, record.folder),
        manifest_sha256=record.sha256,
        create_time=encode_time(record.create_time_s),
        labels=record.labels,
        state=(
            checkpoint_pb2.Checkpoint.STATE_PUBLISHED
            if record.is_published
            else checkpoint_pb2.Checkpoint.STATE_PRIVATE
        ),
        expire_time=None if record.expire_time_s is None else encode_time(record.expire_time_s),
        files=[encode_file(file) for file in record.files],
        source_checkpoint=record.source_checkpoint,
    )


def encode_file(file: StoredFile) -> checkpoint_pb2.CheckpointFile:
    """Return the message of a file."""
    return checkpoint_pb2.CheckpointFile(
        file=file.name, size_bytes=file.size_bytes, sha256=file.sha256
    )


def _decode_forward(request: Any, *, is_backward: bool) -> ForwardWork:
    if not request.data:
        raise EmptyBatchError("data", "holds no datum")
    if not request.loss.name:
        raise InvalidFieldError("loss.name", "is required")
    batch = [_decode_datum(datum, f"data[{index}]") for index, datum in enumerate(request.data)]
    return ForwardWork(batch, request.loss.name, dict(request.loss.config), is_backward)


def _decode_datum(message: trajectories_pb2.Datum, path: str) -> Datum:
    tokens_T, images = decode_input(message.model_input, field=f"{path}.model_input")
    inputs = dict(message.loss_inputs)
    target = inputs.pop("target_tokens", None)
    if target is None:
        raise MissingLossInputError(f'{path}.loss_inputs["target_tokens"]', "is required")
    # Which loss takes [T, K], and how wide, is `validate_batch`'s to say.
    targets_T = decode_array(
        target, f'{path}.loss_inputs["target_tokens"]', np.int64, allows_several=True
    )
    loss_inputs = {
        key: decode_array(tensor, f'{path}.loss_inputs["{key}"]', np.float32, allows_several=True)
        for key, tensor in inputs.items()
    }
    return Datum(tokens_T, targets_T, loss_inputs, images)


def _decode_optim_step(request: trainer_pb2.OptimStepRequest) -> OptimStepWork:
    if not request.adam.HasField("learning_rate"):
        raise InvalidFieldError("adam.learning_rate", "is required")
    adam = AdamParams(**given_fields(request.adam))
    validate_adam(adam)
    if request.observed_sequence_number < 0:
        raise InvalidFieldError("observed_sequence_number", "must be at least 0")
    if request.observes_deliveries and request.observed_sequence_number:
        raise InvalidFieldError("observed_sequence_number", "excludes observes_deliveries")
    observed = None if request.observes_deliveries else request.observed_sequence_number
    return OptimStepWork(adam, observed)


def _decode_save(request: trainer_pb2.SaveCheckpointRequest) -> SaveCheckpointWork:
    checkpoint = decode_checkpoint_id(request.parent, request.checkpoint_id)
    kind = _CHECKPOINT_KINDS.get(request.kind)
    if kind is None:
        raise InvalidFieldError("kind", "must be KIND_TRAINING or KIND_SAMPLER")
    return SaveCheckpointWork(checkpoint, kind, decode_labels(request.labels), decode_ttl(request))


def decode_checkpoint_id(run: str, checkpoint_id: str) -> str:
    """Return the name of a checkpoint that is to be made.

    Raises:
        InvalidFieldError: If its id is not valid.
    """
    chosen = decode_chosen_id(checkpoint_id, "checkpoint_id", is_required=True)
    return f"{run}/checkpoints/{chosen}"


def _encode_result(kind: Kind, result: Result, store_uri: str) -> Message:
    match result:
        case BatchResult():
            outputs = [
                trainer_pb2.DatumOutput(logprobs=encode_tensor(logprobs_T))
                for logprobs_T in result.logprobs
            ]
            if kind is Kind.FORWARD:
                return trainer_pb2.ForwardResponse(outputs=outputs, metrics=result.metrics)
            return trainer_pb2.ForwardBackwardResponse(outputs=outputs, metrics=result.metrics)
        case OptimStepResult():
            return trainer_pb2.OptimStepResponse(version=result.version, metrics=result.metrics)
        case LoadResult():
            return trainer_pb2.LoadCheckpointResponse(version=result.version)
        case CheckpointRecord():
            return encode_checkpoint(result, store_uri)
