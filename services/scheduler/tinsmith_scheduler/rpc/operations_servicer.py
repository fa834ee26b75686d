"""google.longrunning.Operations for the creations of runs, `{run}/operations/create`.

The operations of training calls live on the trainer of the run. A creation cannot be listed,
cancelled or deleted: it is part of its run, which `DeleteTrainingRun` removes.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc.aio
from google.longrunning import operations_pb2

from tinsmith.names import OperationName
from tinsmith_runtime.errors import FailedPreconditionError, OperationNotFoundError
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.requests import parse_name
from tinsmith_scheduler.rpc import codec
from tinsmith_scheduler.rpc.servicer import Domain
from tinsmith_scheduler.runs.run_creation import run_closed

Context = grpc.aio.ServicerContext[Any, Any]

_CREATE = "create"


class OperationsServicer:
    """Maps Operations onto the creations of runs."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    async def GetOperation(
        self,
        request: operations_pb2.GetOperationRequest,
        context: Context,
    ) -> operations_pb2.Operation:
        """Return how a creation stands."""
        return await self._read(_own_operation(request.name))

    async def WaitOperation(
        self,
        request: operations_pb2.WaitOperationRequest,
        context: Context,
    ) -> operations_pb2.Operation:
        """Wait for a creation to end, 20 s at most, and return how it stands."""
        name = _own_operation(request.name)
        operation = await self._read(name)
        if operation.done:
            return operation
        wait_s = codec.decode_wait_s(request)
        await self._domain.creations.wait(str(name.run_name), timeout_s=wait_s)
        return await self._read(name)

    async def ListOperations(
        self,
        request: operations_pb2.ListOperationsRequest,
        context: Context,
    ) -> NoReturn:
        """Refuse: the creations are listed with their runs."""
        raise FailedPreconditionError("creations are not listed; use ListTrainingRuns")

    async def CancelOperation(
        self,
        request: operations_pb2.CancelOperationRequest,
        context: Context,
    ) -> NoReturn:
        """Refuse: a creation ends by itself."""
        raise FailedPreconditionError("a creation is not cancelled; use DeleteTrainingRun")

    async def DeleteOperation(
        self,
        request: operations_pb2.DeleteOperationRequest,
        context: Context,
    ) -> NoReturn:
        """Refuse: a creation is part of its run."""
        raise FailedPreconditionError("a creation is not deleted; use DeleteTrainingRun")

    async def _read(self, name: OperationName) -> operations_pb2.Operation:
        run = await self._domain.runs.find(name.run_name)
        if run is None:
            raise _operation_not_found(name)
        return codec.encode_creation(
            run,
            trainer_address=self._domain.workers.trainer_address(run),
            checkpoint_address=self._domain.workers.ledger_address(run),
            waiting_for=self._domain.creations.waiting_for(run.name),
            closed=run_closed(run),
        )


def _own_operation(value: str) -> OperationName:
    name = parse_name(OperationName, value, "name")
    current_caller().require_project(name.project, lambda: _operation_not_found(name))
    if name.operation != _CREATE:
        raise _operation_not_found(name)
    return name


def _operation_not_found(name: OperationName) -> OperationNotFoundError:
    return OperationNotFoundError(
        f"operation {name} does not exist at the scheduler; those of training calls are at the "
        "trainer of the run",
        operation=name,
    )
