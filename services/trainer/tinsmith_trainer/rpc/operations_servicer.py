"""Maps google.longrunning.Operations onto the operations of runs."""

from __future__ import annotations

from typing import Any

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2

from tinsmith import names
from tinsmith_runtime.errors import FailedPreconditionError, InvalidFieldError
from tinsmith_runtime.ledger import TaskRecord
from tinsmith_runtime.rpc.requests import (
    decode_page_token,
    decode_timeout,
    encode_page_token,
    parse_name,
)
from tinsmith_trainer.checkpoints.tasks import CheckpointTasks
from tinsmith_trainer.cycle.operation_reader import OperationReader
from tinsmith_trainer.ownership.run_registry import RunRegistry
from tinsmith_trainer.rpc.checkpoint_codec import encode_task
from tinsmith_trainer.rpc.training_servicer import MAX_WAIT_S, describe, owned_run

_PAGE_SIZE = 100
_MAX_DIGITS = 18
_TASKS = ("copy-", "export-", "import-")


class OperationsServicer(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    """Get, wait for and list operations; the order of a run cannot be broken by a cancel.

    Copies, exports and imports of checkpoints are told by their names; they are not listed.
    """

    def __init__(
        self, registry: RunRegistry, reader: OperationReader, tasks: CheckpointTasks
    ) -> None:
        self._registry = registry
        self._reader = reader
        self._tasks = tasks

    async def GetOperation(self, request: Any, context: Any) -> operations_pb2.Operation:
        name, number = _parse(request.name)
        run = await owned_run(self._registry, name.run_name)
        if number is None:
            return self._describe_task(await self._tasks.get(str(name)))
        return describe(self._registry, run, await self._reader.operation(run, number))

    async def WaitOperation(self, request: Any, context: Any) -> operations_pb2.Operation:
        name, number = _parse(request.name)
        run = await owned_run(self._registry, name.run_name)
        timeout_s = decode_timeout(request, MAX_WAIT_S)
        if number is None:
            return self._describe_task(await self._tasks.wait(str(name), timeout_s))
        return describe(
            self._registry, run, await self._reader.wait_operation(run, number, timeout_s)
        )

    async def ListOperations(self, request: Any, context: Any) -> Any:
        run = await owned_run(self._registry, parse_name(names.RunName, request.name, "name"))
        list_name = f"{request.name}/operations"
        first = decode_page_token(list_name, request.page_token) or 1
        if request.page_size < 0:
            raise InvalidFieldError("page_size", "must be at least 0")
        size = min(request.page_size or _PAGE_SIZE, _PAGE_SIZE)
        records, following = await self._reader.list_operations(run, first, limit=size)
        return operations_pb2.ListOperationsResponse(
            operations=[describe(self._registry, run, record) for record in records],
            next_page_token=encode_page_token(list_name, following),
        )

    def _describe_task(self, task: TaskRecord) -> operations_pb2.Operation:
        return encode_task(task, self._tasks.progress(task.name))

    async def CancelOperation(self, request: Any, context: Any) -> empty_pb2.Empty:
        raise _refusal(request.name)

    async def DeleteOperation(self, request: Any, context: Any) -> empty_pb2.Empty:
        raise _refusal(request.name)


def _parse(value: str) -> tuple[names.OperationName, int | None]:
    """Return an operation and its sequence number; None for one that is in no order."""
    name = parse_name(names.OperationName, value, "name")
    number = _parse_number(name.operation)
    if number is None and not name.operation.startswith(_TASKS):
        raise InvalidFieldError("name", "must end in a sequence number")
    return name, number


def _parse_number(text: str) -> int | None:
    """Return a sequence number, or None if the text is not one that a ledger can hold."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else None


def _refusal(name: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"{name} cannot be cancelled or deleted: the operations of a run are an ordered record; "
        "delete the run instead",
        operation=name,
    )
