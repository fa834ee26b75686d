"""Where the owners of resources listen, as the scheduler knows it.

An answer is kept until a call to it fails; workers of a role are asked for every few seconds. The
gateway asks with the key of the pods: whether the caller may see a resource is decided by the pod
that owns it, with the caller's own key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from tinsmith.addresses import normalize_address
from tinsmith.replicas import Replicas
from tinsmith.rpc.durations import decode_duration
from tinsmith.rpc.lists import pages
from tinsmith.rpc.sampler_choice import choice_metadata
from tinsmith.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2, workers_pb2_grpc
from tinsmith_gateway.metrics import SAMPLER_CHOICES
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
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_runtime.rpc.scheduler_client import typed_errors
from tinsmith_runtime.shielded import start

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 10.0
_WORKERS_TTL_S = 2.0
_REPLICAS_TTL_S = 5.0
_MAX_ENTRIES = 100_000
_ROLES = {
    "trainer": workers_pb2.Worker.ROLE_TRAINER,
    "sampler": workers_pb2.Worker.ROLE_SAMPLER,
    "environment": workers_pb2.Worker.ROLE_ENVIRONMENT,
    "coordinator": workers_pb2.Worker.ROLE_COORDINATOR,
}


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call goes.

    Attributes:
        address: `host:port` of the pod.
        metadata: What the call carries for having gone there.
    """

    address: str
    metadata: tuple[tuple[str, str], ...] = ()


class Directory:
    """Addresses of owners.

    Args:
        scheduler_address: `host:port` of the scheduler.
        credentials: Of the gateway.
    """

    def __init__(self, scheduler_address: str, credentials: PodCredentials) -> None:
        scheduler_address = normalize_address(scheduler_address, name="scheduler_address")
        self._scheduler_address = scheduler_address
        self._metadata = credentials.metadata
        self._channel = credentials.open_channel(scheduler_address, PodRole.SCHEDULER)
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._worker_stub: Any = workers_pb2_grpc.WorkerServiceStub(self._channel)
        self._addresses: dict[Owner, list[str]] = {}
        self._replicas = Replicas()
        self._refresh_s: dict[Owner, float] = {}
        self._workers: dict[str, tuple[float, list[RoleWorker]]] = {}
        self._asking: dict[Owner, asyncio.Task[list[str]]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._listing: dict[str, asyncio.Task[list[RoleWorker]]] = {}

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def route_to(self, owner: Owner) -> Route:
        """Return where the pod of an owner is; of several equal ones, the one that is preferred.

        Raises:
            TinsmithError: What the scheduler says of the resource, such as `RunNotFoundError`.
            WorkerUnavailableError: If no worker holds it at the moment.
        """
        if isinstance(owner, SchedulerOwner):
            return Route(self._scheduler_address)
        if isinstance(owner, AnyOf | InstanceOwner):
            role = _role_of(owner)
            address = choose_worker(owner, await self.workers(role))
            if not address:
                raise _absent(f"no {role} is there")
            return Route(address)
        known = self._addresses.get(owner)
        if known is None:
            known = await asyncio.shield(self._asked(owner))
        elif self._refresh_s.get(owner, math.inf) < time.monotonic():
            # Replicas may have come meanwhile. Those that are known serve until there is an answer.
            self._refresh_s[owner] = time.monotonic() + _REPLICAS_TTL_S
            self._asked(owner).add_done_callback(_note_failure)
        if not isinstance(owner, SamplingOwner):
            return Route(known[0])
        project = owner.sampling_session.split("/")[1]
        choice = self._replicas.choose(known, owner.prompt, scope=project)
        SAMPLER_CHOICES.labels(choice.reason).inc()
        return Route(choice.address, choice_metadata(choice.reason))

    def _asked(self, owner: Owner) -> asyncio.Task[list[str]]:
        """Return the question for an owner: one for many calls that arrive together."""
        task = self._asking.get(owner)
        if task is None:
            task = self._asking[owner] = start(self._find(owner), self._running)
            task.add_done_callback(lambda _: self._asking.pop(owner, None))
        return task

    def in_flight(self, owner: Owner, address: str) -> contextlib.AbstractContextManager[None]:
        """Count a call while it runs, where calls to an owner are shared out by load."""
        is_shared = isinstance(owner, SamplingOwner)
        return self._replicas.in_flight(address) if is_shared else contextlib.nullcontext()

    def forget(self, owner: Owner, address: str = "") -> None:
        """Ask again next time, as when a call to the address failed.

        Args:
            owner: Whose address it was.
            address: Of the pod that does not answer; empty if it does, and says that it is another.
        """
        self._addresses.pop(owner, None)
        self._refresh_s.pop(owner, None)
        if address and isinstance(owner, SamplingOwner):
            self._replicas.note_failure(address)
        if isinstance(owner, AnyOf | InstanceOwner):
            self._workers.pop(_role_of(owner), None)

    async def workers(self, role: str) -> list[RoleWorker]:
        """Return the workers of a role that are alive; an answer is used for a few seconds.

        Raises:
            TinsmithError: If the scheduler cannot be asked.
        """
        expires_s, workers = self._workers.get(role, (0.0, []))
        if expires_s > time.monotonic():
            return workers
        task = self._listing.get(role)
        if task is None:
            task = self._listing[role] = start(self._list(role), self._running)
            task.add_done_callback(lambda _: self._listing.pop(role, None))
        return await asyncio.shield(task)

    async def _list(self, role: str) -> list[RoleWorker]:
        request = workers_pb2.ListWorkersRequest(role=_ROLES[role])
        listed = pages(lambda each: self._call(self._worker_stub.ListWorkers, each), request)
        async with typed_errors("scheduler"):
            workers = [
                RoleWorker(each.name, each.address, each.pool, each.project)
                async for page in listed
                for each in page.workers
            ]
        if workers:
            self._workers[role] = (time.monotonic() + _WORKERS_TTL_S, workers)
        return workers

    async def _find(self, owner: Owner) -> list[str]:
        async with typed_errors("scheduler"):
            addresses, what = await self._ask(owner)
        if not any(addresses):
            raise _absent(what)
        if len(self._addresses) >= _MAX_ENTRIES:
            self._addresses.clear()
            self._refresh_s.clear()
        self._addresses[owner] = addresses
        if isinstance(owner, SamplingOwner):
            self._refresh_s[owner] = time.monotonic() + _REPLICAS_TTL_S
        return addresses

    async def _ask(self, owner: Owner) -> tuple[list[str], str]:
        """Return addresses, and what their absence means."""
        match owner:
            case RunOwner(run, checkpoint, is_any_on_ledger):
                found = await self._call(
                    self._stub.GetTrainingRun, scheduler_pb2.GetTrainingRunRequest(name=run)
                )
                if is_any_on_ledger:
                    # Older schedulers name only the worker that holds it.
                    address = found.checkpoint_address or found.trainer_address
                    return [address], f"no trainer knows the checkpoints of {run}"
                if found.trainer_address or not checkpoint:
                    return [found.trainer_address], f"no trainer holds {run}"
                # Checkpoints outlive the pool that made them.
                located = await self._call(
                    self._stub.LocateCheckpoint,
                    scheduler_pb2.LocateCheckpointRequest(checkpoint=checkpoint),
                )
                return [located.trainer_address], f"no trainer knows {checkpoint}"
            case SamplingOwner(session):
                found = await self._call(
                    self._stub.GetSamplingSession,
                    scheduler_pb2.GetSamplingSessionRequest(name=session),
                )
                self._replicas.note_loads(
                    (load.address, load.num_requests, decode_duration(load.age))
                    for load in found.sampler_loads
                )
                return list(found.sampler_addresses), f"no sampler serves {session}"
        raise AssertionError(f"{owner} has an address of its own")

    async def _call(self, method: Any, request: Any) -> Any:
        return await method(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)


def pod_role_of(owner: Owner) -> PodRole:
    """Return what the pod is that an owner names."""
    match owner:
        case SchedulerOwner():
            return PodRole.SCHEDULER
        case AnyOf() | InstanceOwner():
            return PodRole(_role_of(owner))
        case SamplingOwner():
            return PodRole.SAMPLER
        case _:
            return PodRole.TRAINER


def _role_of(owner: AnyOf | InstanceOwner) -> str:
    return owner.role if isinstance(owner, AnyOf) else "environment"


def _note_failure(task: asyncio.Task[list[str]]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.info("replicas are not known anew", extra={"problem": str(task.exception())})


def _absent(what: str) -> WorkerUnavailableError:
    return WorkerUnavailableError(f"{what} at the moment; send the request again")
