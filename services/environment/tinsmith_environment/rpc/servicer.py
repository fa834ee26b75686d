"""Maps EnvironmentService onto the registry of instances."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

from tinsmith import names
from tinsmith.v1 import environment_pb2, environment_pb2_grpc
from tinsmith_environment.environment import StepResult
from tinsmith_environment.instances.instances import InstanceRegistry, instance_not_found
from tinsmith_environment.registry import EnvironmentRegistry, environment_not_found
from tinsmith_environment.rpc import codec
from tinsmith_environment.rpc.step_stream import StepStream
from tinsmith_runtime.errors import InstanceNotFoundError, NotFoundError
from tinsmith_runtime.rpc.auth import Caller, current_caller
from tinsmith_runtime.rpc.pages import take_page
from tinsmith_runtime.rpc.requests import current_body, decode_name_part, digest_of, parse_name

Context = Any


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Maps EnvironmentService onto the domain.

    Args:
        environments: What can be played.
        instances: What is being played.
        max_stream_steps: Steps of one stream that run, or whose results wait, at once.
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
        project = _own_project(request.parent)
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
            codec.decode_new_instance(name, request),
            request_id=decode_name_part(request.request_id),
            digest=digest_of(current_body()),
        )
        return codec.encode_instance(view)

    async def StepInstance(
        self, request: environment_pb2.StepInstanceRequest, context: Context
    ) -> environment_pb2.StepInstanceResponse:
        task = self._begin_step(current_caller(), request)
        return codec.encode_step(await asyncio.shield(task))

    async def StepInstances(
        self,
        request_iterator: AsyncIterator[environment_pb2.StepInstancesRequest],
        context: Context,
    ) -> AsyncIterator[environment_pb2.StepInstancesResponse]:
        stream = StepStream(
            self._instances.clients,
            functools.partial(self._begin_step, current_caller()),
            current_caller(),
            max_steps=self._max_stream_steps,
        )
        async for answer in stream.serve(request_iterator):
            yield answer

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

    async def ListEnvironmentStatistics(
        self, request: environment_pb2.ListEnvironmentStatisticsRequest, context: Context
    ) -> environment_pb2.ListEnvironmentStatisticsResponse:
        project = _own_project(request.parent)
        job = codec.decode_job(request.job)
        found, token = take_page(
            f"{request.parent}/environmentStatistics/{job}",
            self._instances.statistics.of(project, job),
            lambda pair: f"{pair[0].job}/{pair[0].environment}",
            request,
        )
        return environment_pb2.ListEnvironmentStatisticsResponse(
            statistics=[codec.encode_statistics(key, entry) for key, entry in found],
            next_page_token=token,
        )

    async def ResetEnvironmentStatistics(
        self, request: environment_pb2.ResetEnvironmentStatisticsRequest, context: Context
    ) -> environment_pb2.ResetEnvironmentStatisticsResponse:
        project = _own_project(request.parent)
        self._instances.statistics.reset(project, codec.decode_job(request.job))
        return environment_pb2.ResetEnvironmentStatisticsResponse()

    def _begin_step(
        self, caller: Caller, request: environment_pb2.StepInstanceRequest
    ) -> asyncio.Task[StepResult]:
        name = parse_name(names.InstanceName, request.instance, "instance")
        return self._instances.begin_step(
            _acting_project(caller, name),
            name,
            codec.decode_step_index(request.step_index),
            codec.decode_action(request.action),
        )


def _own_project(parent: str) -> str:
    project = parse_name(names.ProjectName, parent, "parent").project
    current_caller().require_project(
        project, lambda: NotFoundError(f"{parent} does not exist", parent=project)
    )
    return project


def _acting_project(caller: Caller, name: names.InstanceName) -> str:
    """Return the project that a caller acts for: its own; a pod acts for any."""
    caller.require_project(name.project, lambda: instance_not_found(name))
    return name.project
