"""Native calls that several parts of the Tinker wire make."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.longrunning import operations_pb2
from google.protobuf import timestamp_pb2

from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.lists import pages
from tinsmith.v1 import checkpoint_pb2, scheduler_pb2
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.services import Services
from tinsmith_gateway.tinker.wire import ids
from tinsmith_gateway.upstream.routing import (
    CHECKPOINT_SERVICE,
    OPERATIONS_SERVICE,
    SCHEDULER_SERVICE,
    TRAINER_SERVICE,
)
from tinsmith_runtime.errors import (
    CheckpointNotFoundError,
    ErrorCode,
    InvalidFieldError,
    TinsmithError,
)

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_MAX_LABELS = 64
_MAX_LABEL = 1024
_SERVER_POLL_S = 20.0
_POLL_MARGIN_S = 15.0


class Native:
    """Native calls on behalf of one caller."""

    def __init__(self, services: Services, credential: Credential) -> None:
        self._services = services
        self._credential = credential

    @property
    def project(self) -> str:
        """Id of the caller's project."""
        return self._credential.caller.project

    @property
    def key_id(self) -> str:
        """Id of the caller's key."""
        return self._credential.caller.key_id

    async def aside(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        """Return what work for the caller returns that takes milliseconds, from a thread."""
        return await self._services.threads.run(self.project, work, *args)

    async def call(self, service: str, method: str, request: Any, response: type[Any]) -> Any:
        """Call the pod that owns the resource in field 1."""
        return await self._services.upstream.call(
            service, method, request, response, self._credential
        )

    async def scheduler(self, method: str, request: Any, response: type[Any]) -> Any:
        """Call the scheduler."""
        return await self._services.upstream.call(
            SCHEDULER_SERVICE, method, request, response, self._credential
        )

    async def trainer(
        self, method: str, request: Any, response: type[Any], *, timeout_s: float | None = None
    ) -> Any:
        """Call the trainer that owns what the request names first."""
        return await self._services.upstream.call(
            TRAINER_SERVICE, method, request, response, self._credential, timeout_s=timeout_s
        )

    async def checkpoint_service(self, method: str, request: Any, response: type[Any]) -> Any:
        """Call the trainer that answers for the checkpoint that the request names first."""
        return await self._services.upstream.call(
            CHECKPOINT_SERVICE, method, request, response, self._credential
        )

    async def wait(self, name: str, timeout_s: float) -> operations_pb2.Operation:
        """Wait for an operation, at most as long as servers let one wait."""
        waited_s = min(timeout_s, _SERVER_POLL_S)
        request = operations_pb2.WaitOperationRequest(name=name, timeout=encode_duration(waited_s))
        return await self._services.upstream.call(
            OPERATIONS_SERVICE,
            "WaitOperation",
            request,
            operations_pb2.Operation,
            self._credential,
            timeout_s=waited_s + _POLL_MARGIN_S,
        )

    async def run(self, model_id: str) -> scheduler_pb2.TrainingRun:
        """Return the run behind a model.

        Raises:
            RunNotFoundError: If the caller's project has none.
        """
        request = scheduler_pb2.GetTrainingRunRequest(name=ids.run_name(self.project, model_id))
        found: scheduler_pb2.TrainingRun = await self.scheduler(
            "GetTrainingRun", request, scheduler_pb2.TrainingRun
        )
        return found

    async def checkpoints(self, run: str) -> list[checkpoint_pb2.Checkpoint]:
        """Return the checkpoints of a run, or of all runs of a project, newest first."""
        listed = pages(
            lambda each: self.checkpoint_service(
                "ListCheckpoints", each, checkpoint_pb2.ListCheckpointsResponse
            ),
            checkpoint_pb2.ListCheckpointsRequest(parent=run),
        )
        return [checkpoint async for page in listed for checkpoint in page.checkpoints]

    async def checkpoint(self, path: ids.TinkerPath) -> checkpoint_pb2.Checkpoint:
        """Return the checkpoint that a path means: of the caller's project, or published.

        Raises:
            CheckpointNotFoundError: If there is none.
        """
        try:
            own = await self.checkpoints(ids.run_name(self.project, path.model_id))
        except TinsmithError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return await self._published(path)
        found = ids.newest_match(path, own)
        if found is None:
            raise _not_found(path)
        return found

    async def path_of(self, checkpoint: str) -> ids.TinkerPath:
        """Return the path of a checkpoint by its resource name.

        Raises:
            CheckpointNotFoundError: If the caller may not read it.
        """
        request = checkpoint_pb2.GetCheckpointRequest(name=checkpoint)
        found = await self.checkpoint_service("GetCheckpoint", request, checkpoint_pb2.Checkpoint)
        return ids.path_of(found)

    async def _published(self, path: ids.TinkerPath) -> checkpoint_pb2.Checkpoint:
        """Return a checkpoint of another project; its trainer decides whether it may be read."""
        pods = self._services.callers.for_pods("-")
        request = scheduler_pb2.GetTrainingRunRequest(name=ids.run_name_anywhere(path.model_id))
        try:
            run = await self._services.upstream.call(
                SCHEDULER_SERVICE, "GetTrainingRun", request, scheduler_pb2.TrainingRun, pods
            )
            theirs = await Native(self._services, pods).checkpoints(run.name)
            found = ids.newest_match(path, theirs)
            if found is None:
                raise _not_found(path)
            granted: checkpoint_pb2.Checkpoint = await self.checkpoint_service(
                "GetCheckpoint",
                checkpoint_pb2.GetCheckpointRequest(name=found.name),
                checkpoint_pb2.Checkpoint,
            )
        except TinsmithError as error:
            if error.code is ErrorCode.NOT_FOUND:
                raise _not_found(path) from error
            raise
        return granted


def user_native(call: Call) -> Native:
    """Return native calls on behalf of the sender of a request.

    Raises:
        PermissionDeniedError: If it was sent with the key of an episode.
    """
    call.credential.require_user()
    return Native(call.services, call.credential)


def _not_found(path: ids.TinkerPath) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{path} does not exist, or is not published by its project", checkpoint=path
    )


def iso_time(stamp: timestamp_pb2.Timestamp) -> str:
    """Return a time as ISO 8601, in UTC."""
    moment = datetime.datetime.fromtimestamp(stamp.seconds + stamp.nanos / 1e9, tz=datetime.UTC)
    return moment.isoformat()


def encode_labels(
    metadata: Mapping[str, Any] | None, field: str = "user_metadata"
) -> dict[str, str]:
    """Return a user's metadata as labels; what is no text becomes JSON.

    Raises:
        InvalidFieldError: If it is more than labels can hold.
    """
    labels = {}
    for key, value in (metadata or {}).items():
        labels[key] = value if isinstance(value, str) else json.dumps(value)
    too_long = [
        key for key, text in labels.items() if len(key) > _MAX_LABEL or len(text) > _MAX_LABEL
    ]
    if len(labels) > _MAX_LABELS or too_long:
        raise InvalidFieldError(
            field, f"may hold {_MAX_LABELS} entries of at most {_MAX_LABEL} characters"
        )
    return labels


def user_labels(labels: Mapping[str, str], *, hidden: Sequence[str] = ()) -> dict[str, str] | None:
    """Return labels as a user's metadata; None for none."""
    return {key: value for key, value in labels.items() if key not in hidden} or None
