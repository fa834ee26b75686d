"""A scheduler that knows some keys and sampling sessions, to test another pod on its own."""

from __future__ import annotations

from typing import Any

from google.protobuf import duration_pb2
from tests.support.pod_keys import POD_KEY

from tinsmith.v1 import (
    keys_pb2,
    keys_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from tinsmith_runtime.errors import (
    KeyInvalidError,
    KeyRevokedError,
    SamplingSessionNotFoundError,
)
from tinsmith_runtime.rpc.auth import ApiKey, Authenticator, Caller
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.server import PodServer, ServerConfig


class FakeScheduler(
    scheduler_pb2_grpc.SchedulerServiceServicer,
    keys_pb2_grpc.KeyServiceServicer,
    workers_pb2_grpc.WorkerServiceServicer,
):
    """Knows the keys and sessions that a test gives it."""

    def __init__(self) -> None:
        self.projects: dict[str, str] = {}
        self.roles: dict[str, KeyRole] = {}
        self.pools: dict[str, str] = {}
        self.revoked: set[str] = set()
        self.sampling_sessions: dict[str, scheduler_pb2.SamplingSession] = {}
        self.workers: dict[str, workers_pb2.Worker] = {}
        self.server = PodServer(
            ServerConfig(drain_timeout_s=0.01),
            domain="scheduler.tinsmith",
            authenticator=Authenticator(self, roots=[POD_KEY]),
        )
        self.server.add(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, self)
        self.server.add(keys_pb2_grpc.add_KeyServiceServicer_to_server, self)
        self.server.add(workers_pb2_grpc.add_WorkerServiceServicer_to_server, self)

    def new_key(self, project: str, role: KeyRole = KeyRole.MEMBER, *, pool: str = "") -> str:
        """Return a key of a project; of a member unless told otherwise."""
        key = ApiKey.generate().checked(POD_KEY)
        self.projects[key.key_id] = project
        self.pools[key.key_id] = pool
        self.roles[key.key_id] = role
        return str(key)

    async def verify(self, key_id: str, secret_sha256: bytes, check: str = "") -> Caller:
        if key_id in self.revoked:
            raise KeyRevokedError("the key was revoked")
        if key_id not in self.projects:
            raise KeyInvalidError("the key is unknown")
        return Caller(self.projects[key_id], self.roles[key_id], key_id, self.pools.get(key_id, ""))

    async def VerifyKey(self, request: Any, context: Any) -> keys_pb2.VerifyKeyResponse:
        caller = await self.verify(request.key_id, request.secret_sha256)
        return keys_pb2.VerifyKeyResponse(
            project=caller.project, role=caller.role or "", pool=caller.pool, is_pod=caller.is_pod
        )

    async def RegisterWorker(self, request: Any, context: Any) -> workers_pb2.Worker:
        self.workers[request.worker.name] = request.worker
        request.worker.heartbeat_interval.CopyFrom(duration_pb2.Duration(seconds=5))
        return request.worker

    async def HeartbeatWorker(self, request: Any, context: Any) -> workers_pb2.Worker:
        return self.workers[request.name]

    async def DeregisterWorker(
        self, request: Any, context: Any
    ) -> workers_pb2.DeregisterWorkerResponse:
        self.workers.pop(request.name, None)
        return workers_pb2.DeregisterWorkerResponse()

    async def GetSamplingSession(self, request: Any, context: Any) -> scheduler_pb2.SamplingSession:
        if request.name not in self.sampling_sessions:
            raise SamplingSessionNotFoundError(f"{request.name} does not exist", name=request.name)
        return self.sampling_sessions[request.name]


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """Return the call metadata that carries a key."""
    return (("authorization", f"Bearer {key}"),)
