"""Maps TrainerService onto the registry of runs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from google.longrunning import operations_pb2

from tinsmith import names
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc
from tinsmith_engine import LOSS_NAMES, validate_batch
from tinsmith_engine.contract.model_catalog import ModelCatalog
from tinsmith_runtime.errors import (
    BatchTooLargeError,
    InvalidFieldError,
    OutcomeUnknownError,
    RequestIdReusedError,
    TinsmithError,
)
from tinsmith_runtime.ledger import OperationRecord
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.requests import current_body, decode_name_part, decode_timeout, parse_name
from tinsmith_trainer.checkpoints.registry import CheckpointRegistry
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.cycle.operation_reader import OperationReader, operation_expired
from tinsmith_trainer.ownership.run_registry import RunRegistry, is_final, run_not_found
from tinsmith_trainer.rpc import training_codec
from tinsmith_trainer.rpc.checkpoint_servicer import caller_project
from tinsmith_trainer.rpc.run_status import status_of
from tinsmith_trainer.runs.operations import ForwardWork, Kind, LoadCheckpointWork, Work
from tinsmith_trainer.runs.run import LiveRun

MAX_WAIT_S = 20.0
_ANSWER_S = 1.0
"""What a refusal needs at most to reach its caller."""
_LARGE_BYTES = 64 * 1024

Context = Any
ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Maps TrainerService onto the domain.

    Args:
        config: Limits that are told to clients.
        registry: Runs and their queues.
        reader: Reads operations and waits for them.
        checkpoints: Named checkpoints, for loads of those of other projects.
        catalog: The base models.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: RunRegistry,
        reader: OperationReader,
        checkpoints: CheckpointRegistry,
        catalog: ModelCatalog,
    ) -> None:
        self._config = config
        self._registry = registry
        self._reader = reader
        self._checkpoints = checkpoints
        self._catalog = catalog

    async def GetCapabilities(
        self, request: trainer_pb2.TrainerServiceGetCapabilitiesRequest, context: Context
    ) -> trainer_pb2.TrainerCapabilities:
        return trainer_pb2.TrainerCapabilities(
            models=self._catalog.select(request.base_model),
            losses=sorted(LOSS_NAMES),
            max_batch_tokens=self._config.max_batch_tokens,
            max_batch_datums=self._config.max_batch_datums,
            max_queued_operations=self._config.max_queued_operations,
            max_project_queued_operations=self._config.max_project_queued_operations,
            max_queued_tokens=self._config.max_queued_tokens,
            max_project_queued_tokens=self._config.max_project_queued_tokens,
            max_resident_runs=self._config.max_resident_runs,
            num_resident_runs=sum(run.state.is_resident for run in self._registry.runs),
        )

    async def GetRunStatus(
        self, request: trainer_pb2.GetRunStatusRequest, context: Context
    ) -> trainer_pb2.RunStatus:
        run = await self._owned_run(parse_name(names.RunName, request.run, "run"))
        return status_of(self._registry, run, next_sequence_number=run.queue.next_free_number)

    async def Forward(
        self, request: trainer_pb2.ForwardRequest, context: Context
    ) -> operations_pb2.Operation:
        return await self._submit(
            context, Kind.FORWARD, parse_name(names.RunName, request.run, "run"), request
        )

    async def ForwardBackward(
        self, request: trainer_pb2.ForwardBackwardRequest, context: Context
    ) -> operations_pb2.Operation:
        return await self._submit(
            context, Kind.FORWARD_BACKWARD, parse_name(names.RunName, request.run, "run"), request
        )

    async def OptimStep(
        self, request: trainer_pb2.OptimStepRequest, context: Context
    ) -> operations_pb2.Operation:
        return await self._submit(
            context, Kind.OPTIM_STEP, parse_name(names.RunName, request.run, "run"), request
        )

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Context
    ) -> operations_pb2.Operation:
        run = parse_name(names.RunName, request.parent, "parent")
        return await self._submit(context, Kind.SAVE_CHECKPOINT, run, request)

    async def LoadCheckpoint(
        self, request: trainer_pb2.LoadCheckpointRequest, context: Context
    ) -> operations_pb2.Operation:
        return await self._submit(
            context, Kind.LOAD_CHECKPOINT, parse_name(names.RunName, request.run, "run"), request
        )

    async def WaitOperations(
        self, request: trainer_pb2.WaitOperationsRequest, context: Context
    ) -> trainer_pb2.WaitOperationsResponse:
        run = await self._owned_run(parse_name(names.RunName, request.run, "run"))
        if request.after_revision < 0:
            raise InvalidFieldError("after_revision", "must be at least 0")
        records = await self._reader.wait_operations(
            run, request.after_revision, decode_timeout(request, MAX_WAIT_S)
        )
        return trainer_pb2.WaitOperationsResponse(
            operations=[describe(self._registry, run, record) for record in records],
            revision=records[-1].revision if records else request.after_revision,
        )

    async def _submit(
        self, context: Context, kind: Kind, name: names.RunName, request: Any
    ) -> operations_pb2.Operation:
        """Accept an ordered call, or consume its number with the reason of the refusal."""
        run = await self._owned_run(name)
        is_large = request.ByteSize() > _LARGE_BYTES or _takes_long(request)
        submission = await _aside(
            is_large,
            training_codec.decode_submission,
            kind,
            name,
            request,
            current_body(),
            key_id=current_caller().charged_key_id,
        )
        try:
            decode_name_part(request.request_id)
            self._check_size(request)
            work = await _aside(is_large, training_codec.decode_work, kind, request)
            work = await _aside(is_large, self._validate, run, work)
            if isinstance(work, LoadCheckpointWork):
                await self._check_foreign(work)
            record = await self._registry.submit(submission, work, timeout_s=_time_left(context))
        except OutcomeUnknownError:
            raise
        except TinsmithError as error:
            known = await self._reader.find(submission)
            if known is not None:
                # The same request was accepted before, when it was right.
                return describe(self._registry, run, known, looks_around=False)
            if is_final(error) or isinstance(error, RequestIdReusedError):
                await self._registry.refuse(submission, error)
            raise
        # Thousands are accepted at once by a busy pod, and few clients read more than the name.
        return describe(self._registry, run, record, looks_around=False)

    def _check_size(self, request: Any) -> None:
        """Refuse too many datums before each of them is decoded."""
        num_datums = len(getattr(request, "data", ()))
        if num_datums > self._config.max_batch_datums:
            raise BatchTooLargeError(
                f"the batch has {num_datums} datums, at most {self._config.max_batch_datums} are "
                "allowed; send it in parts",
                limit=self._config.max_batch_datums,
            )

    def _validate(self, run: LiveRun, work: Work) -> Work:
        """Refuse what can be known to be wrong before it is accepted; return what is right.

        The engine does not check a batch again that passed here. One that is read from the ledger
        after a restart it does: the model may be another one by then.
        """
        if not isinstance(work, ForwardWork):
            return work
        if work.num_tokens > self._config.max_batch_tokens:
            raise BatchTooLargeError(
                f"the batch has {work.num_tokens} tokens, at most "
                f"{self._config.max_batch_tokens} are allowed; send it in parts",
                limit=self._config.max_batch_tokens,
            )
        batch = validate_batch(work.batch, work.loss, work.loss_config, run.engine.info)
        return dataclasses.replace(work, batch=batch)

    async def _check_foreign(self, work: LoadCheckpointWork) -> None:
        """Refuse a load of what another project did not publish, as if it did not exist.

        Whether a checkpoint of the project's own exists is seen at its turn: a save before it may
        still be queued.
        """
        project = caller_project()
        if project is not None and work.checkpoint.split("/")[1] != project:
            await self._checkpoints.readable(work.checkpoint, project)

    async def _owned_run(self, name: names.RunName) -> LiveRun:
        """Return a run of the caller's project."""
        return await owned_run(self._registry, name)


def _time_left(context: Context) -> float | None:
    """Return how long a call may take so that its answer still reaches the caller."""
    remaining_s: float | None = context.time_remaining()
    return None if remaining_s is None else remaining_s - min(0.1 * remaining_s, _ANSWER_S)


def _takes_long(request: Any) -> bool:
    """Whether a request takes long to read however small it is: an image has to be decoded."""
    return any(
        chunk.HasField("image")
        for datum in getattr(request, "data", ())
        for chunk in datum.model_input.chunks
    )


async def _aside(
    is_large: bool,
    function: Callable[ParametersT, ResultT],
    *args: ParametersT.args,
    **kwargs: ParametersT.kwargs,
) -> ResultT:
    """Call a function, beside the event loop if it has much to do."""
    if is_large:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


async def owned_run(registry: RunRegistry, name: names.RunName) -> LiveRun:
    """Return a run of the caller's project.

    Raises:
        RunNotFoundError: If there is none, or it belongs to another project.
        RunMovedError: If another trainer holds it.
    """
    current_caller().require_project(name.project, lambda: run_not_found(str(name)))
    return await registry.find(str(name))


def describe(
    registry: RunRegistry, run: LiveRun, record: OperationRecord, *, looks_around: bool = True
) -> operations_pb2.Operation:
    """Return the message of an operation as it stands now.

    Args:
        registry: All runs.
        run: Its run.
        record: Its row.
        looks_around: Whether to count what other runs have before it; see `status_of`.

    Raises:
        OperationExpiredError: If its result is not kept any more.
    """
    if record.is_expired:
        raise operation_expired(record.run, record.sequence_number)
    status = registry.status(run, record.sequence_number, looks_around=looks_around)
    return training_codec.encode_operation(record, status)
