"""Maps EnvironmentService onto the registry of instances."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from tinsmith import names
from tinsmith.v1 import environment_pb2, environment_pb2_grpc
from tinsmith_environment.instances.instances import InstanceRegistry, instance_not_found
from tinsmith_environment.registry import EnvironmentRegistry, environment_not_found
from tinsmith_environment.rpc import codec
from tinsmith_runtime.errors import (
    InstanceNotFoundError,
    NotFoundError,
    TinsmithError,
    internal_error,
)
from tinsmith_runtime.rpc.auth import Caller, current_caller
from tinsmith_runtime.rpc.pages import take_page
from tinsmith_runtime.rpc.requests import current_body, decode_name_part, digest_of, parse_name

logger = logging.getLogger(__name__)

Context = Any
_Answers = asyncio.Queue[environment_pb2.StepInstancesResponse | Exception | None]


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Maps EnvironmentService onto the domain.

    Args:
        environments: What can be played.
        instances: What is being played.
        max_stream_steps: Steps of one stream that run, or wait to be read, at once.
    """

    def __init__(
        self,
        environments: EnvironmentRegistry,
        instances: InstanceRegistry,
        *,
        max_stream_steps: int,
    ) -> None:
        self._environments = environments
        self._instances = instances
        self._max_stream_steps = max_stream_steps

    async def ListEnvironments(
        self, request: environment_pb2.ListEnvironmentsRequest, context: Context
    ) -> environment_pb2.ListEnvironmentsResponse:
        project = parse_name(names.ProjectName, request.parent, "parent").project
        current_caller().require_project(
            project, lambda: NotFoundError(f"{request.parent} does not exist", parent=project)
        )
        specs, token = take_page(
            f"{request.parent}/environments",
            self._environments.specs,
            lambda spec: spec.name,
            request,
        )
        return environment_pb2.ListEnvironmentsResponse(
            environments=[codec.encode_environment(project, spec) for spec in specs],
            next_page_token=token,
        )

    async def CreateInstance(
        self, request: environment_pb2.CreateInstanceRequest, context: Context
    ) -> environment_pb2.EnvironmentInstance:
        name = parse_name(names.EnvironmentName, request.parent, "parent")
        current_caller().require_project(name.project, lambda: environment_not_found(str(name)))
        view = await self._instances.create(
            name.project,
            name.environment,
            seed=request.seed,
            config=codec.decode_config(request.config),
            request_id=decode_name_part(request.request_id),
            digest=digest_of(current_body()),
        )
        return codec.encode_instance(view)

    async def StepInstance(
        self, request: environment_pb2.StepInstanceRequest, context: Context
    ) -> environment_pb2.StepInstanceResponse:
        return await self._step(current_caller(), request)

    async def StepInstances(
        self,
        request_iterator: AsyncIterator[environment_pb2.StepInstancesRequest],
        context: Context,
    ) -> AsyncIterator[environment_pb2.StepInstancesResponse]:
        answers: _Answers = asyncio.Queue()
        # A place is held until its answer was read, so a slow reader slows the stream down.
        places = asyncio.Semaphore(self._max_stream_steps)
        reader = asyncio.create_task(
            self._read_steps(current_caller(), request_iterator, answers, places)
        )
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                places.release()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def GetInstance(
        self, request: environment_pb2.GetInstanceRequest, context: Context
    ) -> environment_pb2.EnvironmentInstance:
        name = parse_name(names.InstanceName, request.name, "name")
        view = self._instances.get(_acting_project(current_caller(), name), name)
        return codec.encode_instance(view)

    async def DeleteInstance(
        self, request: environment_pb2.DeleteInstanceRequest, context: Context
    ) -> environment_pb2.DeleteInstanceResponse:
        name = parse_name(names.InstanceName, request.name, "name")
        # A foreign instance is not told from one that is gone.
        with contextlib.suppress(InstanceNotFoundError):
            self._instances.delete(_acting_project(current_caller(), name), name)
        return environment_pb2.DeleteInstanceResponse()

    async def _step(
        self,
        caller: Caller,
        request: environment_pb2.StepInstanceRequest | environment_pb2.StepInstancesRequest,
    ) -> environment_pb2.StepInstanceResponse:
        name = parse_name(names.InstanceName, request.instance, "instance")
        result = await self._instances.step(
            _acting_project(caller, name),
            name,
            codec.decode_step_index(request.step_index),
            codec.decode_action(request.action),
        )
        return codec.encode_step(result)

    async def _read_steps(
        self,
        caller: Caller,
        requests: AsyncIterator[environment_pb2.StepInstancesRequest],
        answers: _Answers,
        places: asyncio.Semaphore,
    ) -> None:
        """Start each step of a stream; put None, or what ended the stream, behind the answers."""
        end: Exception | None = None
        async with asyncio.TaskGroup() as steps:
            try:
                async for request in requests:
                    await places.acquire()
                    steps.create_task(self._answer_step(caller, request, answers))
            except Exception as error:
                # A malformed message ends the stream; steps before it are answered.
                end = error
        answers.put_nowait(end)

    async def _answer_step(
        self, caller: Caller, request: environment_pb2.StepInstancesRequest, answers: _Answers
    ) -> None:
        answer = environment_pb2.StepInstancesResponse(
            instance=request.instance, step_index=request.step_index
        )
        try:
            answer.step.CopyFrom(await self._step(caller, request))
        except TinsmithError as error:
            answer.failure.CopyFrom(codec.encode_failure(error))
        except Exception:
            logger.exception("step of a stream failed by a bug")
            answer.failure.CopyFrom(codec.encode_failure(internal_error()))
        answers.put_nowait(answer)


def _acting_project(caller: Caller, name: names.InstanceName) -> str:
    """Return the project that a caller acts for: its own; a pod acts for any."""
    caller.require_project(name.project, lambda: instance_not_found(name))
    return name.project
