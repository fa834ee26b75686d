"""A trainer that adopts whatever it is told to, and a real scheduler to test with it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from grpc_status import rpc_status
from tests.support.clock import Clock
from tests.support.pod_keys import POD_KEY, pod

from tinsmith.rpc.error_codec import decode_status, encode_status
from tinsmith.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    keys_pb2,
    keys_pb2_grpc,
    models_pb2,
    run_metrics_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    trainer_control_pb2,
    trainer_control_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from tinsmith_runtime.errors import (
    AbortedError,
    CheckpointNotFoundError,
    ErrorCode,
    KeyInvalidError,
    RunNotFoundError,
    TinsmithError,
)
from tinsmith_runtime.rpc.auth import (
    ApiKey,
    Authenticator,
    Caller,
    derive_job_key,
)
from tinsmith_runtime.rpc.server import PodServer, ServerConfig
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.pod import SchedulerPod

BASE_MODEL = "tiny"
Metadata = tuple[tuple[str, str], ...]


class FakeTrainer(
    trainer_pb2_grpc.TrainerServiceServicer,
    checkpoint_pb2_grpc.CheckpointServiceServicer,
    trainer_control_pb2_grpc.TrainerControlServiceServicer,
):
    """Adopts and releases runs in memory.

    `adopt_errors` are raised first, one for each AdoptRun; while `gate` is cleared, AdoptRun waits.
    `load_errors` and `load_gate` do the same for LoadCheckpoint, `fork_errors` for ForkRun,
    `history_errors` for SetHistoryRetention.
    """

    def __init__(self) -> None:
        self.adopted: dict[str, trainer_control_pb2.AdoptRunRequest] = {}
        self.adopt_calls: list[trainer_control_pb2.AdoptRunRequest] = []
        self.parked: list[str] = []
        self.deleted: list[str] = []
        self.checkpoints: dict[str, str] = {}
        self.kinds: dict[str, Any] = {}
        self.published: set[str] = set()
        self.adapter = models_pb2.AdapterConfig(lora=models_pb2.LoraConfig(rank=4, alpha=8.0))
        self.load_calls: list[trainer_pb2.LoadCheckpointRequest] = []
        self.load_errors: list[TinsmithError] = []
        self.fork_calls: list[trainer_control_pb2.ForkRunRequest] = []
        self.fork_errors: list[TinsmithError] = []
        self.history_calls: list[trainer_control_pb2.SetHistoryRetentionRequest] = []
        self.history_errors: list[TinsmithError] = []
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.adopt_errors: list[TinsmithError] = []
        self.release_errors: list[TinsmithError] = []
        self.resume_errors: list[TinsmithError] = []
        self.statuses: dict[str, trainer_pb2.RunStatus] = {}
        self.list_calls: list[str] = []
        self.list_gate = asyncio.Event()
        self.list_gate.set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.server = PodServer(
            ServerConfig(drain_timeout_s=0.01),
            domain="trainer.tinsmith",
            authenticator=Authenticator(self, roots=[POD_KEY]),
        )
        for add in (
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
            checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server,
            trainer_control_pb2_grpc.add_TrainerControlServiceServicer_to_server,
        ):
            self.server.add(add, self)

    async def verify(self, key_id: str, secret_sha256: bytes, check: str = "") -> Caller:
        raise KeyInvalidError("only pods call this trainer")

    async def AdoptRun(self, request: Any, context: Any) -> trainer_control_pb2.AdoptRunResponse:
        self.adopt_calls.append(request)
        await self.gate.wait()
        if self.adopt_errors:
            raise self.adopt_errors.pop(0)
        held = self.adopted.get(request.run)
        if held is not None and held.epoch > request.epoch:
            raise AbortedError("a higher epoch holds the run")
        self.adopted[request.run] = request
        return trainer_control_pb2.AdoptRunResponse()

    async def ForkRun(self, request: Any, context: Any) -> trainer_control_pb2.ForkRunResponse:
        self.fork_calls.append(request)
        if self.fork_errors:
            raise self.fork_errors.pop(0)
        return trainer_control_pb2.ForkRunResponse(
            rerun_sequence_number=7 if request.reruns_step else 0
        )

    async def SetHistoryRetention(
        self, request: Any, context: Any
    ) -> trainer_control_pb2.SetHistoryRetentionResponse:
        if self.history_errors:
            raise self.history_errors.pop(0)
        self.history_calls.append(request)
        return trainer_control_pb2.SetHistoryRetentionResponse()

    async def ReleaseRun(
        self, request: Any, context: Any
    ) -> trainer_control_pb2.ReleaseRunResponse:
        if self.release_errors:
            raise self.release_errors.pop(0)
        if request.run not in self.adopted:
            raise RunNotFoundError("unknown run")
        if request.mode == trainer_control_pb2.ReleaseRunRequest.MODE_DELETE:
            del self.adopted[request.run]
            self.deleted.append(request.run)
        else:
            self.parked.append(request.run)
        return trainer_control_pb2.ReleaseRunResponse()

    async def ListRunStatuses(
        self, request: Any, context: Any
    ) -> trainer_control_pb2.ListRunStatusesResponse:
        if not request.page_token:
            self.list_calls.append(request.parent)
        await self.list_gate.wait()
        busy = [
            each
            for each in self.statuses.values()
            if each.num_pending_operations or each.replay_diverged
        ]
        # A page holds one run: a caller that reads a single page misses the others.
        index = int(request.page_token or 0)
        return trainer_control_pb2.ListRunStatusesResponse(
            statuses=busy[index : index + 1],
            next_page_token=str(index + 1) if index + 1 < len(busy) else "",
        )

    async def ResumeRun(self, request: Any, context: Any) -> trainer_pb2.RunStatus:
        if self.resume_errors:
            raise self.resume_errors.pop(0)
        if request.run not in self.adopted:
            raise RunNotFoundError("unknown run")
        return self.statuses.get(request.run, trainer_pb2.RunStatus(next_sequence_number=1))

    async def GetCheckpoint(self, request: Any, context: Any) -> checkpoint_pb2.Checkpoint:
        if request.name not in self.checkpoints:
            raise CheckpointNotFoundError("unknown checkpoint")
        checkpoint = checkpoint_pb2.Checkpoint(
            name=request.name,
            base_model=self.checkpoints[request.name],
            kind=self.kinds.get(request.name, checkpoint_pb2.Checkpoint.KIND_TRAINING),
            state=(
                checkpoint_pb2.Checkpoint.STATE_PUBLISHED
                if request.name in self.published
                else checkpoint_pb2.Checkpoint.STATE_PRIVATE
            ),
        )
        checkpoint.adapter.CopyFrom(self.adapter)
        return checkpoint

    async def LoadCheckpoint(self, request: Any, context: Any) -> operations_pb2.Operation:
        self.load_calls.append(request)
        await self.load_gate.wait()
        operation = operations_pb2.Operation(name=f"{request.run}/operations/1", done=True)
        if self.load_errors:
            error = self.load_errors.pop(0)
            if error.code is ErrorCode.UNAVAILABLE:
                raise error
            operation.error.CopyFrom(encode_status(error, domain="trainer.tinsmith"))
        return operation


_ROLES = {
    workers_pb2.Worker.ROLE_TRAINER: "trainer",
    workers_pb2.Worker.ROLE_SAMPLER: "sampler",
    workers_pb2.Worker.ROLE_ENVIRONMENT: "environment",
    workers_pb2.Worker.ROLE_COORDINATOR: "coordinator",
}


class Rig:
    """A scheduler with a channel to it, and one fake trainer."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.clock = Clock(1_000.0)
        self.admin_key = str(ApiKey.generate())
        self.admin = bearer(self.admin_key)
        self.trainer = FakeTrainer()  # type: ignore[abstract]
        self._registered: dict[str, Metadata] = {}
        self.settings: dict[str, Any] = {
            "data_dir": data_dir,
            "pod_key": POD_KEY,
            "bootstrap_key": self.admin_key,
            "drain_timeout_s": 0.05,
            "reap_interval_s": 0.02,
            "placement_retry_s": 0.02,
            **settings,
        }
        self.stub: Any = None
        self.key_stub: Any = None
        self.worker_stub: Any = None
        self.operations: Any = None
        self.jobs: Any = None
        self.run_metrics: Any = None

    async def start(self) -> None:
        self.pod = SchedulerPod(SchedulerConfig(**self.settings), clock=self.clock)
        await self.pod.start()
        self.channel = grpc.aio.insecure_channel(self.pod.address)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        self.key_stub = keys_pb2_grpc.KeyServiceStub(self.channel)
        self.worker_stub = workers_pb2_grpc.WorkerServiceStub(self.channel)
        self.operations = operations_pb2_grpc.OperationsStub(self.channel)
        self.jobs = job_pb2_grpc.JobServiceStub(self.channel)
        self.run_metrics = run_metrics_pb2_grpc.RunMetricsServiceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.pod.stop()

    async def reap(self) -> None:
        """Do what a round in the background does, to its end."""
        assert self.pod.reaper is not None
        await self.pod.reaper.reap()
        await self.pod.reaper.release()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def register(
        self,
        role: int = workers_pb2.Worker.ROLE_TRAINER,
        *,
        name: str = "trainer-0",
        address: str = "",
        max_runs: int = 8,
        base_model: str = BASE_MODEL,
        files: dict[str, bytes] | None = None,
        incarnation: str = "",
        ledger: str = "",
        pool: str = "",
        project: str = "",
        checkpoint: str = "",
    ) -> workers_pb2.Worker:
        worker = workers_pb2.Worker(
            name=f"workers/{name}",
            role=role,  # type: ignore[arg-type]
            address=address or self.trainer.server.address,
            models=[models_pb2.ModelCapabilities(base_model=base_model, vocabulary_size=256)],
            max_runs=max_runs,
            incarnation=incarnation,
            ledger=ledger,
            pool=pool,
            project=project,
            checkpoint=checkpoint,
        )
        request = workers_pb2.RegisterWorkerRequest(worker=worker)
        if files:
            request.tokenizers[base_model].digest = "d1"
            request.tokenizers[base_model].files.update(files)
        self._registered[worker.name] = pod(_ROLES[worker.role], pool=pool)
        answer: workers_pb2.Worker = await self.worker_stub.RegisterWorker(
            request, metadata=self._registered[worker.name], timeout=5
        )
        return answer

    async def register_sampler(self, *, name: str = "sampler-0", address: str = "s:1") -> None:
        await self.register(workers_pb2.Worker.ROLE_SAMPLER, name=name, address=address)

    async def advance(self, seconds: float, *, keep: tuple[str, ...] = ("trainer-0",)) -> None:
        """Let time pass while some workers heartbeat, as often as they have to."""
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self.clock.now_s = min(end_s, self.clock.now_s + 10)
            for name in keep:
                request = workers_pb2.HeartbeatWorkerRequest(name=f"workers/{name}")
                await self.worker_stub.HeartbeatWorker(
                    request, metadata=self._registered[request.name], timeout=5
                )

    async def user(self, project: str = "default", role: str = "") -> Metadata:
        """Return the credential of a new user of a project."""
        request = keys_pb2.CreateKeyRequest(
            parent=f"projects/{project}", request_id=new_id(), role=role
        )
        key = await self.key_stub.CreateKey(request, metadata=self.admin, timeout=60)
        return bearer(key.secret)

    async def job_key(
        self,
        job: str,
        uid: str = "uid-1",
        *,
        pool: str = "",
        key: ApiKey | None = None,
        who: Metadata | None = None,
    ) -> Metadata:
        """Return the credential of the driver of a job."""
        key = key or derive_job_key(POD_KEY, uid)
        request = job_pb2.EnsureJobKeyRequest(
            job=job, uid=uid, key_id=key.key_id, secret_sha256=key.secret_sha256, pool=pool
        )
        await self.jobs.EnsureJobKey(request, metadata=who or pod("controller"), timeout=60)
        return bearer(str(key))

    async def session(self, who: Metadata, project: str = "default") -> str:
        request = scheduler_pb2.CreateSessionRequest(
            parent=f"projects/{project}", request_id=new_id()
        )
        session = await self.stub.CreateSession(request, metadata=who, timeout=60)
        return str(session.name)

    async def begin_run(
        self, who: Metadata, session: str, **fields: Any
    ) -> operations_pb2.Operation:
        fields = {"base_model": BASE_MODEL, "request_id": new_id(), **fields}
        request = scheduler_pb2.CreateTrainingRunRequest(parent=session, **fields)
        return await self.stub.CreateTrainingRun(request, metadata=who, timeout=60)

    async def wait(self, who: Metadata, name: str, wait_s: int = 5) -> operations_pb2.Operation:
        request = operations_pb2.WaitOperationRequest(name=name)
        request.timeout.seconds = wait_s
        return await self.operations.WaitOperation(request, metadata=who, timeout=10)

    async def create_run(
        self, who: Metadata, session: str, **fields: Any
    ) -> scheduler_pb2.TrainingRun:
        operation = await self.begin_run(who, session, **fields)
        operation = await self.wait(who, operation.name)
        assert operation.WhichOneof("result") == "response", operation
        run = scheduler_pb2.TrainingRun()
        assert operation.response.Unpack(run)
        return run

    async def get_run(self, who: Metadata, name: str) -> scheduler_pb2.TrainingRun:
        request = scheduler_pb2.GetTrainingRunRequest(name=name)
        answer: scheduler_pb2.TrainingRun = await self.stub.GetTrainingRun(
            request, metadata=who, timeout=5
        )
        return answer

    async def delete_run(self, who: Metadata, name: str) -> scheduler_pb2.TrainingRun:
        request = scheduler_pb2.DeleteTrainingRunRequest(name=name)
        answer: scheduler_pb2.TrainingRun = await self.stub.DeleteTrainingRun(
            request, metadata=who, timeout=5
        )
        return answer


@contextlib.asynccontextmanager
async def running_rig(data_dir: Path, **settings: Any) -> AsyncIterator[Rig]:
    """Run a scheduler and its trainer, which is not registered yet."""
    rig = Rig(data_dir, **settings)
    await rig.trainer.server.start()
    await rig.start()
    try:
        yield rig
    finally:
        rig.trainer.gate.set()
        rig.trainer.load_gate.set()
        await rig.stop()
        await rig.trainer.server.stop()


@contextlib.contextmanager
def expect_rpc_error(code: grpc.StatusCode, *, reason: str) -> Iterator[list[TinsmithError]]:
    """Expect a call to fail with a typed error, which is put into the list."""
    found: list[TinsmithError] = []
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        yield found
    status = rpc_status.from_call(failure.value)
    assert status is not None, failure.value
    found.append(decode_status(status))
    assert (failure.value.code(), found[0].reason) == (code, reason), failure.value


def bearer(key: str) -> Metadata:
    """Return a credential as call metadata."""
    return (("authorization", f"Bearer {key}"),)


def new_id() -> str:
    """Return a request id."""
    return str(uuid.uuid4())
