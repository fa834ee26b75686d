from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2
from tests.fakes.trainer_harness import make_datum, metadata_of, new_id

from tinsmith import names
from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import checkpoint_pb2, trainer_pb2
from tinsmith_engine import AdamParams, BatchResult, OptimStepResult
from tinsmith_runtime.errors import (
    InvalidFieldError,
    NotFiniteInputError,
    RunNotFoundError,
    ShapeMismatchError,
    TinsmithError,
)
from tinsmith_runtime.ledger import CheckpointRecord, OperationRecord, OperationState
from tinsmith_runtime.rpc.requests import decode_name_part, decode_timeout
from tinsmith_trainer.execution.operation_status import OperationStatus
from tinsmith_trainer.rpc import training_codec
from tinsmith_trainer.runs.operations import (
    ForwardWork,
    Kind,
    LoadCheckpointWork,
    LoadResult,
    OptimStepWork,
    Result,
    SaveCheckpointWork,
)

RUN = names.RunName("p", "r")
State = trainer_pb2.OperationMetadata


def forward_backward(**fields: Any) -> trainer_pb2.ForwardBackwardRequest:
    values: dict[str, Any] = {
        "run": str(RUN),
        "request_id": "11111111-1111-4111-8111-111111111111",
        "sequence_number": 3,
        "data": [make_datum()],
        "loss": trainer_pb2.Loss(name="ppo", config={"clip_low_threshold": 0.7}),
    }
    return trainer_pb2.ForwardBackwardRequest(**values | fields)


# Requests.


def test_a_submission_is_stored_and_hashed_as_the_bytes_that_came() -> None:
    request = forward_backward()
    body = request.SerializeToString(deterministic=True)
    first = training_codec.decode_submission(Kind.FORWARD_BACKWARD, RUN, request, body)
    again = training_codec.decode_submission(Kind.FORWARD_BACKWARD, RUN, request, bytes(body))
    assert first == again
    assert first.payload == body
    # Another spelling of the same message is another request.
    other = training_codec.decode_submission(Kind.FORWARD_BACKWARD, RUN, request, body + b"\x00")
    assert other.digest != first.digest
    assert (other.run, other.sequence_number, other.kind) == (str(RUN), 3, "forward_backward")


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_is_at_least_one(number: int) -> None:
    with pytest.raises(InvalidFieldError, match="at least 1"):
        training_codec.decode_submission(
            Kind.FORWARD_BACKWARD, RUN, forward_backward(sequence_number=number), b""
        )


@pytest.mark.parametrize(
    "request_id",
    [
        pytest.param("", id="empty"),
        pytest.param("x", id="a-letter"),
        pytest.param(new_id().upper(), id="upper-case"),
        pytest.param(new_id() + "\n", id="trailing-newline"),
        pytest.param("0" * 32, id="no-hyphens"),
        pytest.param(new_id()[:-1], id="too-short"),
    ],
)
def test_a_request_id_is_a_uuid(request_id: str) -> None:
    decode_name_part(new_id())
    with pytest.raises(InvalidFieldError, match="UUID"):
        decode_name_part(request_id)


def test_batches_are_decoded() -> None:
    work = training_codec.decode_work(Kind.FORWARD_BACKWARD, forward_backward())
    assert isinstance(work, ForwardWork)
    assert (work.loss, work.loss_config, work.is_backward) == (
        "ppo",
        {"clip_low_threshold": 0.7},
        True,
    )
    (datum,) = work.batch
    assert (datum.tokens_T.dtype, datum.targets_T.dtype) == (np.int64, np.int64)
    assert datum.tokens_T[1:].tolist() == datum.targets_T[:-1].tolist()
    assert datum.loss_inputs["weights"].tolist() == [1.0] * 6
    assert work.num_tokens == 6


def test_chunks_are_joined() -> None:
    datum = make_datum()
    datum.model_input.chunks.add().CopyFrom(datum.model_input.chunks[0])
    work = training_codec.decode_work(Kind.FORWARD, forward_backward(data=[datum]))
    assert isinstance(work, ForwardWork)
    assert (work.num_tokens, work.is_backward) == (12, False)


def test_absent_hyper_parameters_have_their_defaults_and_present_ones_their_value() -> None:
    request = trainer_pb2.OptimStepRequest(
        adam=trainer_pb2.AdamParams(learning_rate=0.0, beta1=0.0), observed_sequence_number=4
    )
    assert training_codec.decode_work(Kind.OPTIM_STEP, request) == OptimStepWork(
        AdamParams(learning_rate=0.0, beta1=0.0), 4
    )
    assert AdamParams() == AdamParams(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    )


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("learning_rate", float("nan"), NotFiniteInputError),
        ("grad_clip_norm", float("inf"), NotFiniteInputError),
        ("learning_rate", -1.0, InvalidFieldError),
        ("weight_decay", -1.0, InvalidFieldError),
        ("grad_clip_norm", -1.0, InvalidFieldError),
        ("beta1", 1.0, InvalidFieldError),
        ("beta1", -0.1, InvalidFieldError),
        ("beta2", 1.0, InvalidFieldError),
        ("eps", 0.0, InvalidFieldError),
    ],
)
def test_a_bad_hyper_parameter_is_named_as_the_request_has_it(
    name: str, value: float, error: type[TinsmithError]
) -> None:
    adam = trainer_pb2.AdamParams(**{"learning_rate": 1.0, name: value})
    with pytest.raises(error) as failure:
        training_codec.decode_work(Kind.OPTIM_STEP, trainer_pb2.OptimStepRequest(adam=adam))
    assert failure.value.metadata["field"] == f"adam.{name}"


@pytest.mark.parametrize("shape", [(), (6, 1, 1)])
def test_a_tensor_of_another_rank_is_named(shape: tuple[int, ...]) -> None:
    datum = make_datum(weights=np.ones(shape, np.float32))
    with pytest.raises(ShapeMismatchError, match=r"shape \[T\] or \[T, K\]") as failure:
        training_codec.decode_work(Kind.FORWARD_BACKWARD, forward_backward(data=[datum]))
    assert failure.value.metadata["field"] == 'data[0].loss_inputs["weights"]'


def test_an_observed_number_is_not_negative() -> None:
    request = trainer_pb2.OptimStepRequest(
        adam=trainer_pb2.AdamParams(learning_rate=1.0), observed_sequence_number=-1
    )
    with pytest.raises(InvalidFieldError) as failure:
        training_codec.decode_work(Kind.OPTIM_STEP, request)
    assert failure.value.metadata == {"field": "observed_sequence_number"}


def test_saves_and_loads_are_decoded() -> None:
    save = trainer_pb2.SaveCheckpointRequest(
        parent=str(RUN), checkpoint_id="a.1", kind=2, labels={"note": "good"}
    )
    name = f"{RUN}/checkpoints/a.1"
    assert training_codec.decode_work(Kind.SAVE_CHECKPOINT, save) == SaveCheckpointWork(
        name, "sampler", {"note": "good"}
    )
    load = trainer_pb2.LoadCheckpointRequest(checkpoint=name, include_optimizer=True)
    assert training_codec.decode_work(Kind.LOAD_CHECKPOINT, load) == LoadCheckpointWork(name, True)


@pytest.mark.parametrize(
    ("timeout", "wanted"),
    [(None, 20.0), ((0, 0), 0.0), ((3, 500_000_000), 3.5), ((10**9, 0), 20.0)],
)
def test_long_polls_are_bounded(timeout: tuple[int, int] | None, wanted: float) -> None:
    request = trainer_pb2.WaitOperationsRequest()
    if timeout is not None:
        request.timeout.CopyFrom(duration_pb2.Duration(seconds=timeout[0], nanos=timeout[1]))
    assert decode_timeout(request, 20.0) == wanted


def test_a_negative_timeout_is_refused() -> None:
    request = operations_pb2.WaitOperationRequest(timeout=duration_pb2.Duration(seconds=-1))
    with pytest.raises(InvalidFieldError, match="timeout"):
        decode_timeout(request, 20.0)


# What is stored, and what is told.

STORE = "file:///store"

CHECKPOINT = CheckpointRecord(
    name=f"{RUN}/checkpoints/a",
    run=str(RUN),
    kind="training",
    base_model="tiny",
    adapter='{"kind": "lora", "rank": 4, "seed": 1, "alpha": 32.0, "train_attention": true, '
    '"train_mlp": true, "train_unembedding": false}',
    version=3,
    sequence_number=9,
    size_bytes=100,
    folder="f",
    sha256="ab",
    create_time_s=1.5,
    labels={"note": "good"},
)
RESULTS: dict[Kind, tuple[Result, Any]] = {
    Kind.FORWARD: (
        BatchResult([np.array([-1.5], np.float32)], {"loss:sum": 1.5, "b": 2.0, "a": 1.0}),
        trainer_pb2.ForwardResponse,
    ),
    Kind.FORWARD_BACKWARD: (BatchResult([], {}), trainer_pb2.ForwardBackwardResponse),
    Kind.OPTIM_STEP: (OptimStepResult(3, {"grad_norm": 1.0}), trainer_pb2.OptimStepResponse),
    Kind.SAVE_CHECKPOINT: (CHECKPOINT, checkpoint_pb2.Checkpoint),
    Kind.LOAD_CHECKPOINT: (LoadResult(0), trainer_pb2.LoadCheckpointResponse),
}


def record(kind: Kind, state: OperationState, **fields: Any) -> OperationRecord:
    values: dict[str, Any] = {
        "run": str(RUN),
        "sequence_number": 7,
        "kind": kind,
        "request_id": None,
        "digest": b"",
        "state": state,
        "num_attempts": 2,
        "submit_time_s": 1.25,
    }
    return OperationRecord(**values | fields)


def encode(record: OperationRecord, **flags: Any) -> Any:
    return training_codec.encode_operation(record, OperationStatus(**flags))


@pytest.mark.parametrize("kind", Kind)
def test_results_are_stored_as_they_are_told(kind: Kind) -> None:
    result, message = RESULTS[kind]
    stored = training_codec.StoredCodec(STORE).encode_result(kind, result)
    assert training_codec.StoredCodec(STORE).encode_result(kind, result) == stored
    operation = encode(
        record(kind, OperationState.SUCCEEDED, result=stored, revision=4, finish_time_s=2.5)
    )
    found = message()
    assert operation.done
    assert operation.response.Unpack(found)
    assert found.SerializeToString(deterministic=True) == stored
    metadata = metadata_of(operation)
    assert operation.name == f"{RUN}/operations/7"
    assert (metadata.state, metadata.kind, metadata.revision) == (State.STATE_SUCCEEDED, kind, 4)
    assert (metadata.num_attempts, metadata.finish_time.nanos) == (2, 500_000_000)


def test_errors_are_stored_as_they_are_told() -> None:
    stored = training_codec.StoredCodec(STORE).encode_error(RunNotFoundError("gone", run="r"))
    operation = encode(record(Kind.FORWARD, OperationState.FAILED, error=stored))
    error = decode_status(operation.error)
    assert (error.reason, error.message, error.metadata) == ("RUN_NOT_FOUND", "gone", {"run": "r"})
    assert metadata_of(operation).state == State.STATE_FAILED


@pytest.mark.parametrize(
    ("flags", "state"),
    [
        ({}, State.STATE_QUEUED),
        ({"is_held": True, "waiting_for": "number 6"}, State.STATE_HELD),
        ({"is_running": True}, State.STATE_RUNNING),
        ({"position": 3, "num_tokens_ahead": 500}, State.STATE_QUEUED),
    ],
)
def test_an_unfinished_operation_says_where_it_is(flags: dict[str, Any], state: Any) -> None:
    operation = encode(record(Kind.FORWARD, OperationState.PENDING), **flags)
    metadata = metadata_of(operation)
    assert (operation.done, operation.WhichOneof("result")) == (False, None)
    assert (metadata.state, metadata.waiting_for) == (state, flags.get("waiting_for", ""))
    assert metadata.queue_position == flags.get("position", 0)
    assert metadata.num_tokens_ahead == flags.get("num_tokens_ahead", 0)
    assert not metadata.HasField("finish_time")


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        (Kind.FORWARD_BACKWARD, forward_backward()),
        (
            Kind.OPTIM_STEP,
            trainer_pb2.OptimStepRequest(adam=trainer_pb2.AdamParams(learning_rate=0.1)),
        ),
    ],
)
def test_a_stored_request_is_the_same_work(kind: Kind, request_: Any) -> None:
    found = training_codec.StoredCodec(STORE).decode_work(kind, request_.SerializeToString())
    assert repr(found) == repr(training_codec.decode_work(kind, request_))
