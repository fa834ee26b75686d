"""Rollouts of CoordinatorService, and the operations that play them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2

from tinsmith.names import RolloutBatchName, RolloutOperationName
from tinsmith.v1 import coordinator_pb2_grpc, rollout_pb2
from tinsmith_coordinator.rollouts.batches import RolloutBatches
from tinsmith_coordinator.rollouts.driver import RolloutDriver
from tinsmith_coordinator.rpc import codec, rollout_codec
from tinsmith_coordinator.rpc.projects import own_project
from tinsmith_coordinator.store import rollout_store
from tinsmith_coordinator.store.rollout_records import Batch
from tinsmith_runtime.errors import InvalidFieldError, OperationNotFoundError
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.requests import (
    decode_identity,
    decode_page_size,
    decode_page_token,
    decode_timeout,
    encode_page_token,
    parse_name,
)

Context = Any

MAX_WAIT_S = 20.0
_ALL_BATCHES = "/rolloutBatches/-"


class RolloutServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Maps the rollouts of CoordinatorService onto the domain."""

    def __init__(self, batches: RolloutBatches, driver: RolloutDriver) -> None:
        self._batches = batches
        self._driver = driver

    async def GenerateRollouts(
        self, request: rollout_pb2.GenerateRolloutsRequest, context: Context
    ) -> operations_pb2.Operation:
        project = own_project(request.parent)
        identity = decode_identity(request, project)
        new = rollout_codec.decode_new_batch(request, project, seed=secrets.randbits(63))
        batch = await self._batches.create(new, identity, key_id=current_caller().key_id)
        return encode(self._driver, batch)

    async def ListRolloutEpisodes(
        self, request: rollout_pb2.ListRolloutEpisodesRequest, context: Context
    ) -> rollout_pb2.ListRolloutEpisodesResponse:
        name = _own_batch(request.parent, "parent")
        list_name = rollout_codec.page_list_name(name)
        ended, following = await self._batches.list_ended(
            name,
            page_size=decode_page_size(request.page_size),
            after_revision=decode_page_token(list_name, request.page_token) or 0,
        )
        return rollout_pb2.ListRolloutEpisodesResponse(
            episodes=[rollout_codec.encode_ended(each) for each in ended],
            next_page_token=encode_page_token(list_name, following),
        )

    async def WatchRolloutEpisodes(
        self, request: rollout_pb2.WatchRolloutEpisodesRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.RolloutUpdate]:
        name = _own_batch(request.name, "name")
        after_revision = codec.decode_revision(request.after_revision)
        async for update in self._batches.watch(name, after_revision):
            waiting_for = self._driver.waiting_for(update.batch)
            yield rollout_codec.encode_update(update, waiting_for)


class OperationsServicer(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    """Get, wait for, list, cancel and delete the operations that play batches."""

    def __init__(self, batches: RolloutBatches, driver: RolloutDriver) -> None:
        self._batches = batches
        self._driver = driver

    async def GetOperation(self, request: Any, context: Context) -> operations_pb2.Operation:
        return encode(self._driver, await self._batches.get(_own_operation(request.name)))

    async def WaitOperation(self, request: Any, context: Context) -> operations_pb2.Operation:
        timeout_s = decode_timeout(request, MAX_WAIT_S)
        name = _own_operation(request.name)
        return encode(self._driver, await self._batches.wait(name, timeout_s))

    async def ListOperations(
        self, request: Any, context: Context
    ) -> operations_pb2.ListOperationsResponse:
        parent, found, rest = request.name.partition(_ALL_BATCHES)
        if not found or rest:
            raise InvalidFieldError("name", "must be projects/{project}/rolloutBatches/-")
        project = own_project(parent)
        page, following = await self._batches.list_page(
            project,
            page_size=decode_page_size(request.page_size),
            before_serial=decode_page_token(request.name, request.page_token),
        )
        return operations_pb2.ListOperationsResponse(
            operations=[encode(self._driver, batch) for batch in page],
            next_page_token=encode_page_token(request.name, following),
        )

    async def CancelOperation(self, request: Any, context: Context) -> empty_pb2.Empty:
        await self._batches.cancel(_own_operation(request.name))
        return empty_pb2.Empty()

    async def DeleteOperation(self, request: Any, context: Context) -> empty_pb2.Empty:
        await self._batches.delete(_own_operation(request.name))
        return empty_pb2.Empty()


def encode(driver: RolloutDriver, batch: Batch) -> operations_pb2.Operation:
    """Return a batch as its operation."""
    return rollout_codec.encode_operation(batch, driver.waiting_for(batch))


def _own_batch(value: str, field: str) -> RolloutBatchName:
    name = parse_name(RolloutBatchName, value, field)
    current_caller().require_project(name.project, lambda: rollout_store.batch_not_found(name))
    return name


def _own_operation(value: str) -> RolloutBatchName:
    name = parse_name(RolloutOperationName, value, "name")
    missing = OperationNotFoundError(f"operation {name} does not exist", operation=name)
    current_caller().require_project(name.project, lambda: missing)
    if name.operation != rollout_codec.GENERATE:
        raise missing
    return name.batch_name
