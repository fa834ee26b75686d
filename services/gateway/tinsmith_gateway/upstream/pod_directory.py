"""Where the owners of resources listen, as the scheduler knows it.

An answer is kept until a call to it fails; workers of a role are asked for every few seconds. The
gateway asks with the key of the pods: whether the caller may see a resource is decided by the pod
that owns it, with the caller's own key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tinsmith.rpc.channels import open_channel
from tinsmith.v1 import scheduler_pb2, scheduler_pb2_grpc
from tinsmith_gateway.upstream.routing import (
    AnyOf,
    InstanceOwner,
    Owner,
    RoleWorker,
    RunOwner,
    SamplingOwner,
    SchedulerOwner,
    choose_worker,
)
from tinsmith_runtime.errors import WorkerUnavailableError
from tinsmith_runtime.rpc.pod_identity import PodCredentials
from tinsmith_runtime.rpc.scheduler_client import typed_errors

_CALL_TIMEOUT_S = 10.0
_WORKERS_TTL_S = 2.0
_MAX_ENTRIES = 100_000
_PAGE_SIZE = 1_000
_ROLES = {
    "trainer": scheduler_pb2.Worker.ROLE_TRAINER,
    "sampler": scheduler_pb2.Worker.ROLE_SAMPLER,
    "environment": scheduler_pb2.Worker.ROLE_ENVIRONMENT,
    "coordinator": scheduler_pb2.Worker.ROLE_COORDINATOR,
}


class Directory:
    """Addresses of owners.

    Args:
        scheduler_address: `host:port` of the scheduler.
        credentials: Of the gateway.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        scheduler_address: str,
        credentials: PodCredentials,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler_address = scheduler_address
        self._metadata = credentials.metadata
        self._clock = clock
        self._channel = open_channel(scheduler_address)
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._addresses: dict[Owner, str] = {}
        self._workers: dict[str, tuple[float, list[RoleWorker]]] = {}
        self._asking: dict[Owner, asyncio.Task[str]] = {}
        self._listing: dict[str, asyncio.Task[list[RoleWorker]]] = {}

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def address_of(self, owner: Owner) -> str:
        """Return `host:port` of an owner.

        Raises:
            TinsmithError: What the scheduler says of the resource, such as `RunNotFoundError`.
            WorkerUnavailableError: If no worker holds it at the moment.
        """
        if isinstance(owner, SchedulerOwner):
            return self._scheduler_address
        if isinstance(owner, AnyOf | InstanceOwner):
            role = _role_of(owner)
            address = choose_worker(owner, await self.workers(role))
            if not address:
                raise _absent(f"no {role} is there")
            return address
        known = self._addresses.get(owner, "")
        if known:
            return known
        # One question for many calls that arrive together.
        task = self._asking.get(owner)
        if task is None:
            task = self._asking[owner] = asyncio.create_task(self._find(owner))
            task.add_done_callback(lambda _: self._asking.pop(owner, None))
        return await asyncio.shield(task)

    def forget(self, owner: Owner) -> None:
        """Ask again next time, as when a call to the address failed."""
        self._addresses.pop(owner, None)
        if isinstance(owner, AnyOf | InstanceOwner):
            self._workers.pop(_role_of(owner), None)

    async def workers(self, role: str) -> list[RoleWorker]:
        """Return the workers of a role that are alive; an answer is used for a few seconds.

        Raises:
            TinsmithError: If the scheduler cannot be asked.
        """
        expires_s, workers = self._workers.get(role, (0.0, []))
        if expires_s > self._clock():
            return workers
        task = self._listing.get(role)
        if task is None:
            task = self._listing[role] = asyncio.create_task(self._list(role))
            task.add_done_callback(lambda _: self._listing.pop(role, None))
        return await asyncio.shield(task)

    async def _list(self, role: str) -> list[RoleWorker]:
        request = scheduler_pb2.ListWorkersRequest(role=_ROLES[role], page_size=_PAGE_SIZE)
        workers: list[RoleWorker] = []
        async with typed_errors("scheduler"):
            while True:
                listed = await self._call(self._stub.ListWorkers, request)
                workers += [
                    RoleWorker(each.name, each.address, each.pool, each.project)
                    for each in listed.workers
                ]
                if not listed.next_page_token:
                    break
                request.page_token = listed.next_page_token
        if workers:
            self._workers[role] = (self._clock() + _WORKERS_TTL_S, workers)
        return workers

    async def _find(self, owner: Owner) -> str:
        async with typed_errors("scheduler"):
            address, what = await self._ask(owner)
        if not address:
            raise _absent(what)
        if len(self._addresses) >= _MAX_ENTRIES:
            self._addresses.clear()
        self._addresses[owner] = address
        return address

    async def _ask(self, owner: Owner) -> tuple[str, str]:
        """Return an address, and what its absence means."""
        match owner:
            case RunOwner(run, checkpoint, is_any_on_ledger):
                found = await self._call(
                    self._stub.GetTrainingRun, scheduler_pb2.GetTrainingRunRequest(name=run)
                )
                if is_any_on_ledger:
                    # Older schedulers name only the worker that holds it.
                    address = found.checkpoint_address or found.trainer_address
                    return address, f"no trainer knows the checkpoints of {run}"
                if found.trainer_address or not checkpoint:
                    return found.trainer_address, f"no trainer holds {run}"
                # Checkpoints outlive the pool that made them.
                located = await self._call(
                    self._stub.LocateCheckpoint,
                    scheduler_pb2.LocateCheckpointRequest(checkpoint=checkpoint),
                )
                return located.trainer_address, f"no trainer knows {checkpoint}"
            case SamplingOwner(session):
                found = await self._call(
                    self._stub.GetSamplingSession,
                    scheduler_pb2.GetSamplingSessionRequest(name=session),
                )
                return found.sampler_address, f"no sampler serves {session}"
        raise AssertionError(f"{owner} has an address of its own")

    async def _call(self, method: Any, request: Any) -> Any:
        return await method(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)


def _role_of(owner: AnyOf | InstanceOwner) -> str:
    return owner.role if isinstance(owner, AnyOf) else "environment"


def _absent(what: str) -> WorkerUnavailableError:
    return WorkerUnavailableError(f"{what} at the moment; send the request again")
