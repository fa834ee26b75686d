"""Many clients at once, each with a connection, a session and a run of its own.

Raw stubs in one event loop instead of SDK clients, which have a thread each: the server is what is
measured, and it gets the same calls.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import duration_pb2

from tinsmith.tensors import encode_tensor, encode_tokens
from tinsmith.v1 import (
    models_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    trajectories_pb2,
)

_TIMEOUT_S = 120.0
_POLL = duration_pb2.Duration(seconds=20)
_CREATED_AT_ONCE = 32
_PAUSE_S = 0.2
_PASSING = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    # Repeated by request id: whatever became of it is found out.
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@dataclass
class ClientCrowdOutcome:
    """What the crowd saw.

    Attributes:
        latencies_s: From the submission of an operation to its result.
        accepted_s: From the submission to the acknowledgement.
        duration_s: From the first submission to the last result.
    """

    latencies_s: list[float] = field(default_factory=list)
    accepted_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0


class Crowd:
    """Clients of one server."""

    def __init__(self, address: str, key: str, base_model: str) -> None:
        self._address = address
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._base_model = base_model
        self._creating = asyncio.Semaphore(_CREATED_AT_ONCE)
        self._outcome = ClientCrowdOutcome()

    async def run(self, num_clients: int, num_futures: int) -> ClientCrowdOutcome:
        """Let all clients begin together once all have a run."""
        members = await asyncio.gather(*(self._create(number) for number in range(num_clients)))
        begin_s = time.perf_counter()
        await asyncio.gather(*(self._work(run, stub, num_futures) for run, stub, _ in members))
        self._outcome.duration_s = time.perf_counter() - begin_s
        await asyncio.gather(*(channel.close() for _, _, channel in members))
        return self._outcome

    async def _create(self, number: int) -> tuple[str, Any, grpc.aio.Channel]:
        async with self._creating:
            channel = grpc.aio.insecure_channel(
                self._address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
            scheduler: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            operations: Any = operations_pb2_grpc.OperationsStub(channel)
            session = await self._call(
                scheduler.CreateSession,
                scheduler_pb2.CreateSessionRequest(
                    parent="projects/default", request_id=_new_id(), client_version="bench"
                ),
            )
            adapter = models_pb2.AdapterConfig(lora=models_pb2.LoraConfig(rank=1, seed=number))
            operation = await self._call(
                scheduler.CreateTrainingRun,
                scheduler_pb2.CreateTrainingRunRequest(
                    parent=session.name,
                    request_id=_new_id(),
                    base_model=self._base_model,
                    adapter=adapter,
                ),
            )
            while not operation.done:
                request = operations_pb2.WaitOperationRequest(name=operation.name, timeout=_POLL)
                operation = await self._call(operations.WaitOperation, request)
            run = scheduler_pb2.TrainingRun()
            if not operation.response.Unpack(run):
                raise RuntimeError(f"no run: {operation.error}")
            await channel.close()
        channel = grpc.aio.insecure_channel(
            run.trainer_address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        await channel.channel_ready()
        return run.name, trainer_pb2_grpc.TrainerServiceStub(channel), channel

    async def _work(self, run: str, stub: Any, num_futures: int) -> None:
        """Submit everything, then collect every result."""
        submitted: dict[int, float] = {}

        async def submit(number: int) -> None:
            submitted[number] = time.perf_counter()
            if number == num_futures:
                request: Any = trainer_pb2.OptimStepRequest(
                    run=run,
                    request_id=_new_id(),
                    sequence_number=number,
                    adam=trainer_pb2.AdamParams(learning_rate=1e-4),
                )
                await self._call(stub.OptimStep, request)
            else:
                request = trainer_pb2.ForwardBackwardRequest(
                    run=run,
                    request_id=_new_id(),
                    sequence_number=number,
                    data=[_DATUM],
                    loss=trainer_pb2.Loss(name="cross_entropy"),
                )
                await self._call(stub.ForwardBackward, request)
            self._outcome.accepted_s.append(time.perf_counter() - submitted[number])

        async with asyncio.TaskGroup() as group:
            for number in range(1, num_futures + 1):
                group.create_task(submit(number))
            await self._collect(run, stub, num_futures, submitted)

    async def _collect(
        self, run: str, stub: Any, num_futures: int, submitted: Mapping[int, float]
    ) -> None:
        num_done, revision = 0, 0
        while num_done < num_futures:
            request = trainer_pb2.WaitOperationsRequest(
                run=run, after_revision=revision, timeout=_POLL
            )
            answer = await self._call(stub.WaitOperations, request)
            now_s = time.perf_counter()
            for operation in answer.operations:
                if operation.HasField("error"):
                    raise RuntimeError(f"{operation.name} failed: {operation.error.message}")
                number = int(operation.name.rpartition("/")[2])
                self._outcome.latencies_s.append(now_s - submitted[number])
            num_done += len(answer.operations)
            revision = max(revision, answer.revision)

    async def _call(self, method: Any, request: Any) -> Any:
        """Call, and again after a refusal that says when: that is how a server holds back."""
        while True:
            try:
                return await method(request, metadata=self._metadata, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _PASSING:
                    raise
                await asyncio.sleep(_PAUSE_S)


def _new_id() -> str:
    return str(uuid.uuid4())


def make_datum() -> trajectories_pb2.Datum:
    """Return a datum of eight tokens, as a message."""
    tokens = np.arange(5, 14)
    return trajectories_pb2.Datum(
        model_input=trajectories_pb2.ModelInput(
            chunks=[trajectories_pb2.Chunk(tokens=encode_tokens(tokens[:-1]))]
        ),
        loss_inputs={
            "target_tokens": encode_tensor(tokens[1:].astype(np.int64)),
            "weights": encode_tensor(np.ones(len(tokens) - 1, np.float32)),
        },
    )


_DATUM = make_datum()
