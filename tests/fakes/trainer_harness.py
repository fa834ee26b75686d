"""A real trainer pod with the real engine on a tiny model, and clients that speak to it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import duration_pb2
from grpc_status import rpc_status
from tests.fakes.scheduler import FakeScheduler, bearer
from tests.support.pod_keys import POD_KEY, pod

from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.error_codec import decode_status
from tinsmith.tensors import decode_tensor, encode_tensor, encode_tokens
from tinsmith.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    models_pb2,
    trainer_control_pb2,
    trainer_control_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    trajectories_pb2,
)
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import TinsmithError
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.pod import TrainerPod

BASE_MODEL = "tiny"
TIMEOUT_S = 60.0
Metadata = tuple[tuple[str, str], ...]
SCHEDULER: Metadata = pod("scheduler")


def new_id() -> str:
    """Return a request id."""
    return str(uuid.uuid4())


def make_datum(num_tokens: int = 6, seed: int = 0, **changes: Any) -> trajectories_pb2.Datum:
    """Return a sequence for cross_entropy; a change of None leaves a tensor out."""
    tokens_T = np.random.default_rng(seed).integers(3, 90, num_tokens + 1)
    tensors: dict[str, Any] = {
        "tokens": tokens_T[:-1],
        "target_tokens": tokens_T[1:],
        "weights": np.ones(num_tokens, np.float32),
        **changes,
    }
    chunk = trajectories_pb2.Chunk(tokens=encode_tokens(tensors.pop("tokens")))
    return trajectories_pb2.Datum(
        model_input=trajectories_pb2.ModelInput(chunks=[chunk]),
        loss_inputs={
            key: encode_tensor(np.asarray(value))
            for key, value in tensors.items()
            if value is not None
        },
    )


def policy_datum(num_tokens: int = 6, seed: int = 0, **changes: Any) -> trajectories_pb2.Datum:
    """Return a sequence for the policy losses, a third of it prompt; for gspo give it a mask."""
    random = np.random.default_rng(seed)
    logprobs_T = random.normal(-4.6, 0.5, num_tokens).astype(np.float32)
    advantages_T = random.normal(size=num_tokens).astype(np.float32)
    for values_T in (logprobs_T, advantages_T):
        values_T[: num_tokens // 3] = 0.0
    tensors = {"weights": None, "logprobs": logprobs_T, "advantages": advantages_T}
    return make_datum(num_tokens, seed, **tensors | changes)


def metadata_of(operation: Any) -> trainer_pb2.OperationMetadata:
    """Return what an operation says of itself."""
    metadata = trainer_pb2.OperationMetadata()
    assert operation.metadata.Unpack(metadata)
    return metadata


def response_of(operation: Any, message: Any) -> Any:
    """Return the response of an operation that succeeded."""
    assert operation.done
    assert not operation.HasField("error"), operation.error.message
    assert operation.response.Unpack(message)
    return message


def error_of(operation: Any) -> TinsmithError:
    """Return the error of an operation that failed."""
    assert operation.done
    assert operation.HasField("error"), "the operation succeeded"
    return decode_status(operation.error)


async def refusal(call: Awaitable[Any]) -> TinsmithError:
    """Return the typed error that a call is refused with."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)
        if status is None:
            raise
        return decode_status(status)
    raise AssertionError(f"not refused: {answer}")


class RunClient:
    """Calls of one project on one run; counts the sequence numbers."""

    def __init__(self, rig: TrainerRig, name: str, key: str) -> None:
        self.rig = rig
        self.name = name
        self.metadata = bearer(key)
        self.next_number = 1

    def _envelope(self, number: int | None, request_id: str | None) -> dict[str, Any]:
        if number is None:
            number = self.next_number
        self.next_number = max(self.next_number, number + 1)
        return {"request_id": request_id or new_id(), "sequence_number": number}

    async def call(self, method: str, request: Any, **options: Any) -> Any:
        """Call any method of the trainer."""
        options = {"metadata": self.metadata, "timeout": TIMEOUT_S, **options}
        return await getattr(self.rig.stub, method)(request, **options)

    async def forward_backward(
        self,
        *data: trajectories_pb2.Datum,
        number: int | None = None,
        request_id: str | None = None,
        loss: str = "cross_entropy",
        config: dict[str, float] | None = None,
        method: str = "ForwardBackward",
    ) -> Any:
        message = getattr(trainer_pb2, f"{method}Request")
        request = message(
            run=self.name,
            data=data or [make_datum()],
            loss=trainer_pb2.Loss(name=loss, config=config or {}),
            **self._envelope(number, request_id),
        )
        return await self.call(method, request)

    async def optim_step(
        self,
        *,
        number: int | None = None,
        request_id: str | None = None,
        observed: int = 0,
        observes_deliveries: bool = False,
        **adam: float,
    ) -> Any:
        request = trainer_pb2.OptimStepRequest(
            run=self.name,
            adam=trainer_pb2.AdamParams(**{"learning_rate": 1e-2, **adam}),
            observed_sequence_number=observed,
            observes_deliveries=observes_deliveries,
            **self._envelope(number, request_id),
        )
        return await self.call("OptimStep", request)

    async def save(
        self,
        checkpoint_id: str,
        kind: Any = checkpoint_pb2.Checkpoint.KIND_TRAINING,
        *,
        number: int | None = None,
        **fields: Any,
    ) -> Any:
        request = trainer_pb2.SaveCheckpointRequest(
            parent=self.name,
            checkpoint_id=checkpoint_id,
            kind=kind,
            **self._envelope(number, None),
            **fields,
        )
        return await self.call("SaveCheckpoint", request)

    async def load(
        self, checkpoint: str, *, include_optimizer: bool = True, number: int | None = None
    ) -> Any:
        request = trainer_pb2.LoadCheckpointRequest(
            run=self.name,
            checkpoint=checkpoint,
            include_optimizer=include_optimizer,
            **self._envelope(number, None),
        )
        return await self.call("LoadCheckpoint", request)

    async def wait(self, operation: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Return an operation, given by message or number, once it is done."""
        name = operation if isinstance(operation, int) else operation.name.rpartition("/")[2]
        request = operations_pb2.WaitOperationRequest(
            name=f"{self.name}/operations/{name}",
            timeout=duration_pb2.Duration(nanos=int(timeout_s % 1 * 1e9), seconds=int(timeout_s)),
        )
        return await self.rig.operations.WaitOperation(
            request, metadata=self.metadata, timeout=TIMEOUT_S
        )

    async def get(self, number: int) -> Any:
        """Return an operation as it stands."""
        request = operations_pb2.GetOperationRequest(name=f"{self.name}/operations/{number}")
        return await self.rig.operations.GetOperation(
            request, metadata=self.metadata, timeout=TIMEOUT_S
        )

    async def resume(self) -> trainer_pb2.RunStatus:
        """Say that the client of the run is gone, as the scheduler does."""
        request = trainer_control_pb2.ResumeRunRequest(run=self.name)
        return await self.call("ResumeRun", request, metadata=pod("scheduler"))

    async def status(self) -> trainer_pb2.RunStatus:
        return await self.call("GetRunStatus", trainer_pb2.GetRunStatusRequest(run=self.name))

    async def step(self, *data: trajectories_pb2.Datum) -> int:
        """Train once, knowing of all that failed before, and return the version."""
        observed = self.next_number - 1
        gradient = await self.forward_backward(*data)
        update = await self.optim_step(observed=observed)
        response_of(await self.wait(gradient), trainer_pb2.ForwardBackwardResponse())
        return response_of(await self.wait(update), trainer_pb2.OptimStepResponse()).version

    async def saved(self, checkpoint_id: str, **options: Any) -> checkpoint_pb2.Checkpoint:
        """Save a checkpoint and return it."""
        operation = await self.wait(await self.save(checkpoint_id, **options))
        return response_of(operation, checkpoint_pb2.Checkpoint())

    async def bits(self, checkpoint_id: str) -> dict[str, bytes]:
        """Save weights and moments, and return the files."""
        return checkpoint_files(await self.saved(checkpoint_id))


def checkpoint_files(checkpoint: checkpoint_pb2.Checkpoint) -> dict[str, bytes]:
    """Return the tensor files of a checkpoint."""
    folder = Path(checkpoint.manifest_uri.removeprefix("file://")).parent
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def logprobs_of(operation: Any) -> list[list[float]]:
    """Return the log-probabilities of a forward_backward that succeeded."""
    response = response_of(operation, trainer_pb2.ForwardBackwardResponse())
    return [decode_tensor(output.logprobs).tolist() for output in response.outputs]


class TrainerStubs:
    """The methods of all services of a trainer, by their names."""

    def __init__(self, channel: Any) -> None:
        for stub in (
            trainer_pb2_grpc.TrainerServiceStub,
            checkpoint_pb2_grpc.CheckpointServiceStub,
            trainer_control_pb2_grpc.TrainerControlServiceStub,
        ):
            vars(self).update(vars(stub(channel)))


class TrainerRig:
    """A pod, the scheduler that it asks for keys, and a channel."""

    def __init__(self, data_dir: Path, host: EngineHost, **settings: Any) -> None:
        self.host = host
        self.scheduler = FakeScheduler()
        self.fenced: list[Exception] = []
        self.failed: list[Exception] = []
        self.passed_s = 0.0
        """Time that a test let pass by the wall clock of the pod, for what expires."""
        self.config = TrainerConfig(
            **{
                "data_dir": data_dir,
                "base_models": f"{BASE_MODEL}={host.directories[BASE_MODEL]}",
                "pod_key": POD_KEY,
                "scheduler_address": "127.0.0.1:1",
                "num_threads": 1,
                "drain_timeout_s": 0.05,
                "max_resident_runs": 8,
                **settings,
            }
        )
        self.pod: TrainerPod
        self.channel: grpc.aio.Channel
        self.stub: Any
        self.operations: Any

    async def start(self) -> None:
        await self.scheduler.server.start()
        self.config = dataclasses.replace(
            self.config, scheduler_address=self.scheduler.server.address
        )
        await self._start_pod()

    async def stop(self) -> None:
        await self._stop_pod()
        await self.scheduler.server.stop()

    async def restart(self, **settings: Any) -> None:
        """Stop the pod, which parks its runs, and start it, perhaps with other settings."""
        await self._stop_pod()
        self.config = dataclasses.replace(self.config, **settings)
        await self._start_pod()

    async def recover_from(self, left_behind: Path, **settings: Any) -> None:
        """Continue from a copy of the data folder, as a kill at the time of the copy left it."""
        await self.restart(data_dir=left_behind, **settings)

    def copy_data(self) -> Path:
        """Return a copy of the data folder as it is now; the ledger first, then its files."""
        source = self.config.data_dir
        target = source.with_name(source.name + "-" + uuid.uuid4().hex[:8])
        target.mkdir()
        for path in sorted(source.glob("trainer.db*")):
            shutil.copy(path, target)
        if (source / "store").exists():
            shutil.copytree(
                source / "store", target / "store", ignore=shutil.ignore_patterns(".writing-*")
            )
        return target

    async def sweep(self, elapsed_s: float = 0.0) -> None:
        """Let wall time pass, and have what is old enough dropped."""
        self.passed_s += elapsed_s
        await self.pod._retention.sweep()

    async def _start_pod(self) -> None:
        self.pod = TrainerPod(
            self.config,
            self.host,
            on_fenced=self.fenced.append,
            on_failed=self.failed.append,
            wall_clock=lambda: time.time() + self.passed_s,
        )
        await self.pod.start()
        self.channel = grpc.aio.insecure_channel(self.pod.address)
        self.stub = TrainerStubs(self.channel)
        self.operations = operations_pb2_grpc.OperationsStub(self.channel)

    async def _stop_pod(self) -> None:
        await self.channel.close()
        await self.pod.stop()

    async def adopt(
        self,
        name: str,
        *,
        epoch: int = 1,
        base_model: str = BASE_MODEL,
        metadata: Metadata = SCHEDULER,
        history_s: float | None = None,
        **lora: Any,
    ) -> Any:
        """Place a run, as the scheduler does."""
        config = models_pb2.LoraConfig(**{"rank": 2, "seed": 1, **lora})
        request = trainer_control_pb2.AdoptRunRequest(
            run=name,
            epoch=epoch,
            base_model=base_model,
            adapter=models_pb2.AdapterConfig(lora=config),
            history_retention=None if history_s is None else encode_duration(history_s),
        )
        return await self.stub.AdoptRun(request, metadata=metadata, timeout=TIMEOUT_S)

    async def new_run(self, run_id: str = "r", *, project: str = "p", **wanted: Any) -> RunClient:
        """Place a run and return a client of its project."""
        name = f"projects/{project}/trainingRuns/{run_id}"
        await self.adopt(name, **wanted)
        return RunClient(self, name, self.scheduler.new_key(project))

    async def fork(
        self,
        source: RunClient,
        step: int,
        run_id: str = "f",
        *,
        reruns_step: bool = False,
        **lora: Any,
    ) -> RunClient:
        """Place a run and make it the copy of another one, as the scheduler does."""
        fork = await self.new_run(run_id, project=source.name.split("/")[1], **lora)
        request = trainer_control_pb2.ForkRunRequest(
            run=fork.name,
            epoch=1,
            source_run=source.name,
            source_step=step,
            reruns_step=reruns_step,
        )
        await self.stub.ForkRun(request, metadata=SCHEDULER, timeout=TIMEOUT_S)
        fork.next_number = (await fork.status()).next_sequence_number
        return fork

    @contextlib.contextmanager
    def engine_held(self) -> Iterator[None]:
        """Keep the engine busy, so that what is submitted waits."""
        release = threading.Event()
        held = self.host.thread.submit(release.wait)
        try:
            yield
        finally:
            release.set()
            held.result(TIMEOUT_S)

    def limit_ledger(self, *, spare_pages: int | None) -> None:
        """Let the ledger grow by some pages only, as on a full disk; None lifts the limit."""
        database = self.pod._ledger._database

        def limit(connection: Any) -> None:
            num_pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            most = 2**30 if spare_pages is None else num_pages + spare_pages
            connection.exec_driver_sql(f"PRAGMA max_page_count={most}")

        database.write_sync(limit)


def edit_ledger(data_dir: Path, statement: str, *values: Any) -> None:
    """Change the ledger of a pod that is stopped."""
    with contextlib.closing(sqlite3.connect(data_dir / "trainer.db")) as connection:
        connection.execute(statement, values)
        connection.commit()


def query_ledger(data_dir: Path, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Read the ledger."""
    with contextlib.closing(sqlite3.connect(data_dir / "trainer.db")) as connection:
        return connection.execute(query, values).fetchall()


@contextlib.asynccontextmanager
async def running_trainer(
    data_dir: Path, host: EngineHost, **settings: Any
) -> AsyncIterator[TrainerRig]:
    """Run a trainer pod for the time of a test."""
    rig = TrainerRig(data_dir, host, **settings)
    await rig.start()
    try:
        yield rig
    finally:
        await rig.stop()


def code_of(error: TinsmithError) -> str:
    """Return the name of an error's status code."""
    return error.code.name
