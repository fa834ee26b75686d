"""WorkerService: one method for each call, which decodes, checks the pod, calls, encodes."""

from __future__ import annotations

from typing import Any

import grpc.aio

from tinsmith.names import WorkerName
from tinsmith.v1 import workers_pb2, workers_pb2_grpc
from tinsmith_runtime.errors import WorkerForeignError
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.pages import take_page
from tinsmith_runtime.rpc.requests import parse_name
from tinsmith_scheduler.rpc import worker_codec
from tinsmith_scheduler.runs.migration import Moves
from tinsmith_scheduler.store.records import Worker
from tinsmith_scheduler.workers.workers import Workers

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(workers_pb2_grpc.WorkerServiceServicer):
    """Maps WorkerService onto the list of workers.

    Args:
        workers: What is served.
        moves: Looks again when workers come and go.
        heartbeat_interval_s: What workers are told.
    """

    def __init__(self, workers: Workers, moves: Moves, *, heartbeat_interval_s: float) -> None:
        self._workers = workers
        self._moves = moves
        self._heartbeat_interval_s = heartbeat_interval_s

    async def RegisterWorker(
        self, request: workers_pb2.RegisterWorkerRequest, context: Context
    ) -> workers_pb2.Worker:
        """Add a worker."""
        worker = worker_codec.decode_worker(request.worker)
        _check_identity(worker)
        self._check_holder(worker.name)
        tokenizers = worker_codec.decode_tokenizers(request)
        registered = await self._workers.register(worker, tokenizers)
        self._moves.look()
        return self._encode_worker(registered)

    async def ListWorkers(
        self, request: workers_pb2.ListWorkersRequest, context: Context
    ) -> workers_pb2.ListWorkersResponse:
        """List the workers that are alive."""
        role = worker_codec.decode_role(request)
        workers, token = take_page(
            f"workers/{role}",
            self._workers.alive(role),
            lambda worker: worker.name,
            request,
        )
        return workers_pb2.ListWorkersResponse(
            workers=[
                worker_codec.encode_listed_worker(
                    worker, heartbeat_interval_s=self._heartbeat_interval_s
                )
                for worker in workers
            ],
            next_page_token=token,
        )

    async def HeartbeatWorker(
        self, request: workers_pb2.HeartbeatWorkerRequest, context: Context
    ) -> workers_pb2.Worker:
        """Keep a worker listed."""
        name = parse_name(WorkerName, request.name, "name")
        self._check_holder(str(name))
        load = worker_codec.decode_load(request.load) if request.HasField("load") else None
        worker = self._workers.heartbeat(str(name), request.incarnation, load)
        return self._encode_worker(worker)

    async def DeregisterWorker(
        self, request: workers_pb2.DeregisterWorkerRequest, context: Context
    ) -> workers_pb2.DeregisterWorkerResponse:
        """Take a worker off the list."""
        name = parse_name(WorkerName, request.name, "name")
        self._check_holder(str(name))
        self._workers.deregister(str(name), request.incarnation)
        self._moves.look()
        return workers_pb2.DeregisterWorkerResponse()

    def _check_holder(self, name: str) -> None:
        """Raise `WorkerForeignError` if a worker of another role or pool has a name."""
        worker = self._workers.listed(name)
        if worker is not None:
            _check_identity(worker)

    def _encode_worker(self, worker: Worker) -> workers_pb2.Worker:
        return worker_codec.encode_worker(worker, heartbeat_interval_s=self._heartbeat_interval_s)


def _check_identity(worker: Worker) -> None:
    """Raise `WorkerForeignError` unless the caller's key is of the role and pool of a worker."""
    caller = current_caller()
    if (caller.role, caller.pool) != (worker.role.value, worker.pool):
        raise WorkerForeignError(
            f"{worker.name} is a {worker.role.value} of pool {worker.pool!r}, and the key is of a "
            f"{caller.role} of pool {caller.pool!r}; give the pod the key of its role and pool",
            worker=worker.name,
        )
