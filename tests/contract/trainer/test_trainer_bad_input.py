"""Bad input: each row is refused with its meaning, and no other run notices.

What is wrong with a batch, with hyper-parameters or with a configuration alone is a row of
`tests/unit/engine/`, a damaged file one of `test_runtime_manifests.py`; here is one of each reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from google.longrunning import operations_pb2
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    code_of,
    error_of,
    make_datum,
    new_id,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import (
    checkpoint_pb2,
    models_pb2,
    tensors_pb2,
    trainer_control_pb2,
    trainer_pb2,
    trajectories_pb2,
)
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import TinsmithError

NAN = float("nan")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Row:
    """A bad request, and what its sender is to be told.

    Attributes:
        send: Sends it; the answer is an error, or an operation that fails.
        says: What the message must contain: the resource or field, and what to do.
        metadata: Values of `ErrorInfo.metadata`; `...` means any that is not empty.
        consumes: Whether the sequence number is used up, as a failed operation.
    """

    send: Callable[[RunClient], Awaitable[Any]]
    code: str
    reason: str
    says: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    consumes: bool = True


def batch(*data: trajectories_pb2.Datum, **options: Any) -> Callable[[RunClient], Awaitable[Any]]:
    return lambda run: run.forward_backward(*data, **options)


def adam(**values: float) -> Callable[[RunClient], Awaitable[Any]]:
    return lambda run: run.optim_step(**values)


def adopt(name: str = "projects/p/trainingRuns/new", **options: Any) -> Any:
    return lambda run: run.rig.adopt(name, **options)


def with_weights(tensor: tensors_pb2.Tensor) -> trajectories_pb2.Datum:
    datum = make_datum()
    datum.loss_inputs["weights"].CopyFrom(tensor)
    return datum


def image() -> trajectories_pb2.Datum:
    datum = make_datum()
    datum.model_input.chunks.add().image.CopyFrom(
        trajectories_pb2.ImageChunk(data=b"png", format="png")
    )
    return datum


async def unknown_run(run: RunClient) -> Any:
    stranger = RunClient(run.rig, "projects/p/trainingRuns/none", "")
    stranger.metadata = run.metadata
    return await stranger.forward_backward()


async def without_key(run: RunClient) -> Any:
    client = RunClient(run.rig, run.name, "")
    client.metadata = ()
    return await client.forward_backward(number=run.next_number)


async def number_taken(run: RunClient) -> Any:
    return await run.forward_backward(number=1)


async def id_taken(run: RunClient) -> Any:
    number = run.next_number
    await run.wait(await run.forward_backward(request_id=(request_id := new_id())))
    return await run.forward_backward(make_datum(seed=5), number=number, request_id=request_id)


async def id_taken_at_next_number(run: RunClient) -> Any:
    await run.wait(await run.forward_backward(request_id=(request_id := new_id())))
    return await run.forward_backward(make_datum(seed=5), request_id=request_id)


async def no_gradient(run: RunClient) -> Any:
    return await run.optim_step()


async def malformed(run: RunClient) -> Any:
    call = run.rig.channel.unary_unary("/tinsmith.v1.TrainerService/ForwardBackward")
    return await call(b"\xff\xff\xff\xff", metadata=run.metadata, timeout=TIMEOUT_S)


async def bad_request_id(run: RunClient) -> Any:
    return await run.forward_backward(request_id="not-a-uuid")


async def saved_then_damaged(run: RunClient, damage: Callable[[Path], None]) -> Any:
    checkpoint = await run.saved("damaged")
    damage(Path(checkpoint.manifest_uri.removeprefix("file://")).parent)
    return await run.load(checkpoint.name)


def flip_a_bit(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))


def damaged(damage: Callable[[Path], None]) -> Callable[[RunClient], Awaitable[Any]]:
    return lambda run: saved_then_damaged(run, damage)


async def load_other_rank(run: RunClient) -> Any:
    other = await run.rig.new_run("of-rank-4", rank=4)
    return await run.load((await other.saved("big")).name)


async def load_weights_as_training(run: RunClient) -> Any:
    checkpoint = await run.saved("weights", kind=checkpoint_pb2.Checkpoint.KIND_SAMPLER)
    return await run.load(checkpoint.name, include_optimizer=True)


async def load_foreign(run: RunClient) -> Any:
    other = await run.rig.new_run("theirs", project="someone-else")
    return await run.load((await other.saved("secret")).name)


async def save_twice(run: RunClient) -> Any:
    await run.saved("same")
    return await run.save("same")


def get_operation(name: str) -> Callable[[RunClient], Awaitable[Any]]:
    def send(run: RunClient) -> Any:
        request = operations_pb2.GetOperationRequest(name=f"{run.name}/operations/{name}")
        return run.rig.operations.GetOperation(request, metadata=run.metadata, timeout=TIMEOUT_S)

    return send


def list_operations(**fields: Any) -> Callable[[RunClient], Awaitable[Any]]:
    def send(run: RunClient) -> Any:
        request = operations_pb2.ListOperationsRequest(name=run.name, **fields)
        return run.rig.operations.ListOperations(request, metadata=run.metadata, timeout=TIMEOUT_S)

    return send


async def cancel(run: RunClient) -> Any:
    request = operations_pb2.CancelOperationRequest(name=f"{run.name}/operations/1")
    return await run.rig.operations.CancelOperation(
        request, metadata=run.metadata, timeout=TIMEOUT_S
    )


def any_call(method: str, request: Any) -> Callable[[RunClient], Awaitable[Any]]:
    return lambda run: run.call(method, request)


def tensor(shape: list[int], data: bytes, dtype: int = tensors_pb2.DTYPE_FLOAT32) -> Any:
    return tensors_pb2.Tensor(dtype=dtype, shape=shape, data=data)


NOT_FOUND, INVALID = "NOT_FOUND", "INVALID_ARGUMENT"
PRECONDITION, EXHAUSTED = "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"

ROWS = {
    # Names.
    "unknown-model": Row(
        adopt(base_model="gpt-9"),
        NOT_FOUND,
        "MODEL_NOT_FOUND",
        ("gpt-9", "served are: tiny"),
        {"base_model": "gpt-9"},
        consumes=False,
    ),
    "unknown-run": Row(
        unknown_run, NOT_FOUND, "RUN_NOT_FOUND", ("trainingRuns/none", "list runs"), {"run": ...},
        consumes=False,
    ),
    "run-name-malformed": Row(
        any_call("GetRunStatus", trainer_pb2.GetRunStatusRequest(run="../../etc")),
        INVALID,
        "INVALID_FIELD",
        ("run must be projects/{project}/trainingRuns/{run}",),
        {"field": "run"},
        consumes=False,
    ),
    "unknown-checkpoint": Row(
        lambda run: run.load(f"{run.name}/checkpoints/none"),
        NOT_FOUND,
        "CHECKPOINT_NOT_FOUND",
        ("checkpoints/none", "list checkpoints"),
        {"checkpoint": ...},
    ),
    "foreign-checkpoint": Row(
        load_foreign, NOT_FOUND, "CHECKPOINT_NOT_FOUND", ("list checkpoints",), {"checkpoint": ...}
    ),
    "unknown-operation": Row(
        get_operation("77"), NOT_FOUND, "OPERATION_NOT_FOUND", ("operation 77", "not accepted"),
        {"sequence_number": "77"}, consumes=False,
    ),
    "operation-name-absurd": Row(
        get_operation("9" * 40), INVALID, "INVALID_FIELD", ("sequence number",),
        {"field": "name"}, consumes=False,
    ),
    "operation-name-word": Row(
        get_operation("first"), INVALID, "INVALID_FIELD", metadata={"field": "name"}, consumes=False
    ),
    "operation-cancel": Row(
        cancel, PRECONDITION, "WRONG_STATE", ("cannot be cancelled", "delete the run instead"),
        {"operation": ...}, consumes=False,
    ),
    # Tokens and tensors.
    "token-too-high": Row(
        batch(make_datum(), make_datum(tokens=[5, 6, 100_000, 7, 8, 9])),
        INVALID,
        "TOKEN_OUT_OF_VOCABULARY",
        ("[1]", "100000", "position 2", "vocabulary"),
        {"field": ..., "token": "100000"},
    ),
    "shape-without-data": Row(
        batch(with_weights(tensor([2**20], b"\0" * 8))), INVALID, "SHAPE_MISMATCH",
        ("weights", "8 bytes"), {"field": 'data[0].loss_inputs["weights"]'},
    ),
    "image": Row(
        batch(image()), INVALID, "INVALID_FIELD", ("no images",),
        {"field": "data[0].model_input.chunks[1]"},
    ),
    # Batches.
    "empty-batch": Row(
        lambda run: run.call(
            "ForwardBackward",
            trainer_pb2.ForwardBackwardRequest(
                run=run.name,
                request_id=new_id(),
                sequence_number=run.next_number,
                loss=trainer_pb2.Loss(name="cross_entropy"),
            ),
        ),
        INVALID,
        "EMPTY_BATCH",
        ("data", "no datum"),
        {"field": "data"},
    ),
    "too-many-datums": Row(
        batch(*[make_datum(num_tokens=1)] * 9), EXHAUSTED, "BATCH_TOO_LARGE",
        ("9 datums", "at most 8", "in parts"), {"limit": "8"},
    ),
    "too-many-tokens": Row(
        batch(make_datum(num_tokens=300), make_datum(num_tokens=300)), EXHAUSTED,
        "BATCH_TOO_LARGE", ("600 tokens", "at most 512", "in parts"), {"limit": "512"},
    ),
    # Losses.
    "unknown-loss": Row(
        batch(loss="mse"), INVALID, "UNKNOWN_LOSS", ("loss", "'mse'", "cross_entropy"),
        {"field": ..., "loss": "mse"},
    ),
    "no-loss": Row(
        batch(loss=""), INVALID, "INVALID_FIELD", ("loss.name", "required"), {"field": "loss.name"}
    ),
    "missing-targets": Row(
        batch(make_datum(target_tokens=None)), INVALID, "MISSING_LOSS_INPUT",
        ("target_tokens", "required"), {"field": 'data[0].loss_inputs["target_tokens"]'},
    ),
    # Numbers and ids.
    "number-taken": Row(
        number_taken, "ABORTED", "SEQUENCE_NUMBER_REUSED", ("sequence number 1", "next free"),
        {"sequence_number": "1"}, consumes=False,
    ),
    "number-far-ahead": Row(
        batch(number=2**62), EXHAUSTED, "QUEUE_FULL", (str(2**62), "ahead"), {"run": ...},
        consumes=False,
    ),
    "id-taken": Row(
        id_taken, PRECONDITION, "REQUEST_ID_REUSED", ("another body", "new UUID"),
        {"request_id": ...}, consumes=False,
    ),
    "id-taken-at-next-number": Row(
        id_taken_at_next_number, PRECONDITION, "REQUEST_ID_REUSED", ("another body", "new UUID"),
        {"request_id": ...},
    ),
    "id-no-uuid": Row(
        bad_request_id, INVALID, "INVALID_FIELD", ("UUID",), {"field": "request_id"}
    ),
    # Optimizer.
    "no-gradient": Row(
        no_gradient, PRECONDITION, "NO_GRADIENT", ("no gradient", "forward_backward first"),
        {"run": ...},
    ),
    "adam-nan": Row(
        adam(learning_rate=NAN), INVALID, "NOT_FINITE", ("adam.learning_rate",),
        {"field": "adam.learning_rate"},
    ),
    "adam-missing": Row(
        lambda run: run.call(
            "OptimStep",
            trainer_pb2.OptimStepRequest(
                run=run.name, request_id=new_id(), sequence_number=run.next_number
            ),
        ),
        INVALID,
        "INVALID_FIELD",
        ("adam.learning_rate", "required"),
        {"field": "adam.learning_rate"},
    ),
    # Adapters.
    "rank-absurd": Row(
        adopt(rank=1_000_000), INVALID, "INVALID_FIELD", ("lora.rank", "1 to 128", "1000000"),
        {"field": "lora.rank"}, consumes=False,
    ),
    "adapter-missing": Row(
        lambda run: run.rig.stub.AdoptRun(
            trainer_control_pb2.AdoptRunRequest(
                run="projects/p/trainingRuns/new",
                epoch=1,
                base_model="tiny",
                adapter=models_pb2.AdapterConfig(),
            ),
            metadata=pod("scheduler"),
            timeout=TIMEOUT_S,
        ),
        INVALID, "INVALID_FIELD", ("adapter", "lora or full"), {"field": "adapter"},
        consumes=False,
    ),
    # Bytes and credentials.
    "malformed-bytes": Row(
        malformed, INVALID, "MALFORMED_REQUEST", ("ForwardBackward", "stubs"), {"method": ...},
        consumes=False,
    ),
    "key-missing": Row(
        without_key, "UNAUTHENTICATED", "KEY_MISSING", ("authorization: Bearer",),
        consumes=False,
    ),
    # Checkpoints.
    "checkpoint-edited": Row(
        damaged(flip_a_bit), "DATA_LOSS", "CHECKPOINT_CORRUPT",
        ("optimizer.safetensors", "SHA-256"), {"file": "optimizer.safetensors"},
    ),
    "checkpoint-manifest-edited": Row(
        damaged(edit_manifest), "DATA_LOSS", "CHECKPOINT_CORRUPT", ("manifest.json", "changed"),
        {"file": "manifest.json"},
    ),
    "checkpoint-other-rank": Row(
        load_other_rank, PRECONDITION, "CHECKPOINT_INCOMPATIBLE", ("same configuration",),
        {"checkpoint": ...},
    ),
    "checkpoint-without-optimizer": Row(
        load_weights_as_training, PRECONDITION, "CHECKPOINT_INCOMPATIBLE",
        ("no optimizer state", "include_optimizer"), {"checkpoint": ...},
    ),
    "checkpoint-exists": Row(
        save_twice, "ALREADY_EXISTS", "CHECKPOINT_ALREADY_EXISTS",
        ("checkpoints/same", "another name"), {"checkpoint": ...},
    ),
    "checkpoint-id-path": Row(
        lambda run: run.save("../up"), INVALID, "INVALID_FIELD", ("checkpoint_id",),
        {"field": "checkpoint_id"},
    ),
    "checkpoint-kind": Row(
        lambda run: run.save("a", kind=0), INVALID, "INVALID_FIELD", ("KIND_TRAINING",),
        {"field": "kind"},
    ),
    # Lists.
    "page-size-negative": Row(
        list_operations(page_size=-1), INVALID, "INVALID_FIELD", ("page_size",),
        {"field": "page_size"}, consumes=False,
    ),
    "page-token-absurd": Row(
        list_operations(page_token="9" * 5000), INVALID, "INVALID_FIELD", ("page_token",),
        {"field": "page_token"}, consumes=False,
    ),
    "revision-negative": Row(
        lambda run: run.call(
            "WaitOperations", trainer_pb2.WaitOperationsRequest(run=run.name, after_revision=-1)
        ),
        INVALID, "INVALID_FIELD", ("after_revision",), {"field": "after_revision"},
        consumes=False,
    ),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    async with running_trainer(
        tmp_path_factory.mktemp("trainer"),
        engine_host,
        max_batch_tokens=512,
        max_batch_datums=8,
        max_queued_operations=64,
    ) as rig:
        bystander = await rig.new_run("bystander", project="q")
        await bystander.step()
        # An accumulation that is open all the time.
        await bystander.wait(await bystander.forward_backward())
        before = await bystander.bits("before")
        yield rig
        assert await bystander.bits("after") == before


async def failure(run: RunClient, call: Awaitable[Any]) -> TinsmithError:
    """Return the error of a call, or of the operation that it made."""

    async def through_operation() -> Any:
        operation = await call
        done = await run.wait(operation)
        failures.append(error_of(done))

    failures: list[TinsmithError] = []
    try:
        return await refusal(through_operation())
    except AssertionError:
        if not failures:
            raise
        return failures[0]


@pytest.mark.parametrize("name", ROWS)
async def test_bad_input(rig: TrainerRig, name: str) -> None:
    row = ROWS[name]
    run = await rig.new_run(name)
    assert await run.step() == 1

    error = await failure(run, row.send(run))

    assert (code_of(error), error.reason) == (row.code, row.reason), error
    for part in row.says:
        assert part in error.message
    for key, wanted in row.metadata.items():
        assert error.metadata[key] if wanted is ... else error.metadata[key] == wanted
    if "field" in row.metadata:
        assert [each.field for each in error.field_violations] == [error.metadata["field"]]
    status = await run.status()
    number = status.next_sequence_number
    if row.consumes:
        operation = await run.get(number - 1)
        assert error_of(operation).reason == row.reason
    assert status.version == 1
    # The run goes on with the next number.
    run.next_number = number
    assert await run.step() == 2
    assert rig.fenced == []


async def test_random_bytes_are_never_an_untyped_error(rig: TrainerRig) -> None:
    run = await rig.new_run("random-bytes")
    random = np.random.default_rng(0)
    files = (trainer_pb2, checkpoint_pb2, trainer_control_pb2)
    services = [each for file in files for each in file.DESCRIPTOR.services_by_name.values()]
    for method in [method for service in services for method in service.methods]:
        call = rig.channel.unary_unary(f"/{method.full_name.rpartition('.')[0]}/{method.name}")
        for _ in range(5):
            body = random.bytes(int(random.integers(1, 40)))
            error = await refusal(call(body, metadata=run.metadata, timeout=TIMEOUT_S))
            assert error.reason != "INTERNAL", (method.name, body)
    response_of(await run.wait(await run.forward_backward()), trainer_pb2.ForwardBackwardResponse())
