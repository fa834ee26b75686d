"""A real gateway before fakes of the pods: real ports, real credentials, pods that do as told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.longrunning import operations_pb2
from grpc_status import rpc_status
from tests.fakes.scheduler import FakeScheduler, bearer
from tests.support.pod_keys import POD_KEY
from tests.support.wait import TIMEOUT_S as WAIT_S

from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    environment_pb2,
    environment_pb2_grpc,
    sampler_pb2,
    sampler_pb2_grpc,
    scheduler_pb2,
    trainer_control_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    workers_pb2,
)
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.pod import GatewayPod
from tinsmith_runtime.errors import RunNotFoundError, TinsmithError
from tinsmith_runtime.rpc.auth import Authenticator, current_caller
from tinsmith_runtime.rpc.server import PodServer, ServerConfig

PROJECT = "p"
RUN = f"projects/{PROJECT}/trainingRuns/run-1"
SAMPLING_SESSION = f"projects/{PROJECT}/samplingSessions/s-1"
TIMEOUT_S = 60.0


class GatewayScheduler(FakeScheduler):
    """Knows where runs and workers are."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, str] = {}
        """Address of the trainer by run; empty if no trainer holds it."""
        self.checkpoints: dict[str, str] = {}
        """Address of a trainer that knows it, by checkpoint."""
        self.checkpoint_addresses: dict[str, str] = {}
        """Address of a trainer that knows its checkpoints, by run."""
        self.num_lookups = 0
        self.held_run = ""
        """Callers that ask for this run wait until `release` is set."""
        self.num_held = 0
        self.release = asyncio.Event()

    async def LocateCheckpoint(
        self, request: Any, context: Any
    ) -> scheduler_pb2.LocateCheckpointResponse:
        return scheduler_pb2.LocateCheckpointResponse(
            trainer_address=self.checkpoints[request.checkpoint]
        )

    async def GetTrainingRun(self, request: Any, context: Any) -> scheduler_pb2.TrainingRun:
        caller = current_caller()
        if caller.is_pod:
            self.num_lookups += 1
        elif request.name == self.held_run:
            self.num_held += 1
            await self.release.wait()
        if request.name not in self.runs:
            raise RunNotFoundError(f"run {request.name} does not exist", run=request.name)
        caller.require_project(
            request.name.split("/")[1], lambda: RunNotFoundError(f"no run {request.name}")
        )
        return scheduler_pb2.TrainingRun(
            name=request.name,
            trainer_address=self.runs[request.name],
            checkpoint_address=self.checkpoint_addresses.get(request.name, ""),
        )

    async def ListWorkers(self, request: Any, context: Any) -> workers_pb2.ListWorkersResponse:
        workers = [worker for worker in self.workers.values() if worker.role == request.role]
        # A page holds one worker: a caller that reads a single page misses the others.
        index = int(request.page_token or 0)
        return workers_pb2.ListWorkersResponse(
            workers=workers[index : index + 1],
            next_page_token=str(index + 1) if index + 1 < len(workers) else "",
        )

    def list_worker(self, role: Any, address: str, *, pool: str = "") -> None:
        """List a worker."""
        name = f"workers/{len(self.workers)}"
        self.workers[name] = workers_pb2.Worker(name=name, role=role, address=address, pool=pool)


class FakePod(
    trainer_pb2_grpc.TrainerServiceServicer,
    checkpoint_pb2_grpc.CheckpointServiceServicer,
    trainer_control_pb2_grpc.TrainerControlServiceServicer,
    sampler_pb2_grpc.SamplerServiceServicer,
    environment_pb2_grpc.EnvironmentServiceServicer,
):
    """A trainer, sampler and environment that keeps what it is sent, and fails when told to.

    Args:
        scheduler: Knows the keys.
        services: Which it has.
    """

    def __init__(
        self, scheduler: GatewayScheduler, services: str = "trainer sampler environment"
    ) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.timeouts_s: list[float] = []
        self.fail: list[TinsmithError] = []
        """Raised by the calls that come, one by one."""
        self.hold = asyncio.Event()
        """Calls wait until it is set."""
        self.hold.set()
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.num_pieces = 3
        self.server = PodServer(
            ServerConfig(drain_timeout_s=0.01),
            domain="trainer.tinsmith",
            authenticator=Authenticator(scheduler, roots=[POD_KEY]),
        )
        adders: dict[str, Any] = {
            "trainer": trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
            "sampler": sampler_pb2_grpc.add_SamplerServiceServicer_to_server,
            "environment": environment_pb2_grpc.add_EnvironmentServiceServicer_to_server,
        }
        for service in services.split():
            self.server.add(adders[service], self)
        if "trainer" in services:
            self.server.add(checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server, self)
            self.server.add(
                trainer_control_pb2_grpc.add_TrainerControlServiceServicer_to_server, self
            )

    async def _take(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.timeouts_s.append(context.time_remaining())
        self.entered.set()
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.fail:
            raise self.fail.pop(0)

    async def GetCheckpoint(self, request: Any, context: Any) -> checkpoint_pb2.Checkpoint:
        await self._take(request, context)
        return checkpoint_pb2.Checkpoint(name=request.name)

    async def ListCheckpoints(
        self, request: Any, context: Any
    ) -> checkpoint_pb2.ListCheckpointsResponse:
        await self._take(request, context)
        return checkpoint_pb2.ListCheckpointsResponse()

    async def ListEnvironments(
        self, request: Any, context: Any
    ) -> environment_pb2.ListEnvironmentsResponse:
        await self._take(request, context)
        return environment_pb2.ListEnvironmentsResponse()

    async def GetRunStatus(self, request: Any, context: Any) -> trainer_pb2.RunStatus:
        current_caller().require_project(
            request.run.split("/")[1], lambda: RunNotFoundError(f"{request.run}: no such run")
        )
        await self._take(request, context)
        await context.send_initial_metadata((("x-from-pod", "initial"),))
        context.set_trailing_metadata((("x-from-pod-bin", b"\x00\xff"),))
        status = trainer_pb2.RunStatus(run=request.run, version=7)
        # A field that a later release may add: field 1000, text.
        status.MergeFromString(b"\xc2\x3e\x02hi")
        return status

    async def ForwardBackward(self, request: Any, context: Any) -> operations_pb2.Operation:
        await self._take(request, context)
        return operations_pb2.Operation(name=f"{request.run}/operations/1")

    async def WaitOperations(
        self, request: Any, context: Any
    ) -> trainer_pb2.WaitOperationsResponse:
        await self._take(request, context)
        return trainer_pb2.WaitOperationsResponse(revision=1)

    async def Sample(self, request: Any, context: Any) -> sampler_pb2.SampleResponse:
        await self._take(request, context)
        return sampler_pb2.SampleResponse()

    async def StreamSample(
        self, request: Any, context: Any
    ) -> AsyncIterator[sampler_pb2.StreamSampleResponse]:
        if self.fail:
            raise self.fail.pop(0)
        context.set_trailing_metadata((("x-from-pod", "trailing"),))
        for index in range(self.num_pieces):
            yield sampler_pb2.StreamSampleResponse(token_index=index)
        await self._take(request, context)

    async def StepInstances(
        self, requests: Any, context: Any
    ) -> AsyncIterator[environment_pb2.StepInstancesResponse]:
        async for request in requests:
            yield environment_pb2.StepInstancesResponse(
                instance=request.instance, step_index=request.step_index
            )


class GatewayRig:
    """The pods, a gateway, a key of a user and a channel to the gateway."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.scheduler = GatewayScheduler()
        self.pod = FakePod(self.scheduler)
        self.other = FakePod(self.scheduler)
        self.key = self.scheduler.new_key(PROJECT)
        self.gateway: GatewayPod
        self.channel: grpc.aio.Channel
        self._folder = folder
        self._settings = settings

    async def start(self) -> None:
        """Start everything; the run and the sampling session are held by `pod`."""
        for server in (self.scheduler.server, self.pod.server, self.other.server):
            await server.start()
        address = self.pod.server.address
        self.scheduler.runs[RUN] = address
        self.scheduler.sampling_sessions[SAMPLING_SESSION] = scheduler_pb2.SamplingSession(
            name=SAMPLING_SESSION, sampler_addresses=[address]
        )
        for role in ("TRAINER", "SAMPLER", "ENVIRONMENT"):
            self.scheduler.list_worker(workers_pb2.Worker.Role.Value(f"ROLE_{role}"), address)
        config: dict[str, Any] = {
            "data_dir": self._folder,
            "scheduler_address": self.scheduler.server.address,
            "pod_key": POD_KEY,
            "drain_timeout_s": 5.0,
            # Clients of a test share its event loop: a busy machine may keep them from writing.
            "handshake_timeout_s": WAIT_S,
            **self._settings,
        }
        self.gateway = GatewayPod(GatewayConfig(**config))
        await self.gateway.start()
        self.channel = grpc.aio.insecure_channel(self.gateway.address)

    async def stop(self) -> None:
        """Stop everything."""
        self.pod.hold.set()
        self.other.hold.set()
        await self.channel.close()
        await self.gateway.stop()
        for server in (self.pod.server, self.other.server, self.scheduler.server):
            await server.stop()

    def call(
        self,
        path: str,
        request: Any,
        response: Any,
        *,
        key: str | None = None,
        timeout_s: float | None = TIMEOUT_S,
        metadata: tuple[tuple[str, str], ...] = (),
        channel: grpc.aio.Channel | None = None,
    ) -> Any:
        """Send a message, or bytes, to a unary method."""
        stub: Any = (channel or self.channel).unary_unary(
            path,
            request_serializer=lambda value: (
                value if isinstance(value, bytes) else value.SerializeToString()
            ),
            response_deserializer=response.FromString if response is not None else None,
        )
        headers = (*bearer(self.key if key is None else key), *metadata)
        return stub(request, timeout=timeout_s, metadata=headers)

    def get_run_status(self, run: str = RUN, **options: Any) -> Any:
        """Ask for the status of a run."""
        return self.call(
            "/tinsmith.v1.TrainerService/GetRunStatus",
            trainer_pb2.GetRunStatusRequest(run=run),
            trainer_pb2.RunStatus,
            **options,
        )

    def wait_operations(self, **options: Any) -> Any:
        """Wait for operations of the run."""
        return self.call(
            "/tinsmith.v1.TrainerService/WaitOperations",
            trainer_pb2.WaitOperationsRequest(run=RUN),
            trainer_pb2.WaitOperationsResponse,
            **options,
        )

    def stream_sample(self, **options: Any) -> Any:
        """Stream a sample."""
        stub: Any = sampler_pb2_grpc.SamplerServiceStub(self.channel)
        return stub.StreamSample(
            sampler_pb2.StreamSampleRequest(sampling_session=SAMPLING_SESSION),
            metadata=bearer(self.key),
            **{"timeout": TIMEOUT_S, **options},
        )


@contextlib.asynccontextmanager
async def running_gateway(folder: Path, **settings: Any) -> AsyncIterator[GatewayRig]:
    """Run a gateway and the pods behind it."""
    rig = GatewayRig(folder, **settings)
    try:
        await rig.start()
        yield rig
    finally:
        await rig.stop()


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


def code_of(error: TinsmithError) -> str:
    """Return the name of an error's status code."""
    return error.code.name
