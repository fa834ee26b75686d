"""Environments on the server: list them, create instances, act; `client` has the forms."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format, struct_pb2

from tinsmith import names, tensors
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.rpc.futures import ResultFuture
from tinsmith.rpc.lists import read_pages
from tinsmith.rpc.located_service import LocatedService
from tinsmith.rpc.transport import Endpoint
from tinsmith.types import ImageChunk
from tinsmith.v1 import environment_pb2, trajectories_pb2


@dataclass(frozen=True, slots=True)
class Environment:
    """A task that can be played."""

    name: str
    description: str
    default_config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows to the agent."""

    messages: list[dict[str, str]] = field(default_factory=list)
    """With `role` and `content`, to append to the conversation; empty after the last step."""
    images: list[ImageChunk] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to."""

    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any]


class EnvironmentInstance:
    """One play of an environment. Usable as a context manager, which deletes it at the end."""

    def __init__(
        self, core: ClientCore, endpoint: Endpoint, message: environment_pb2.EnvironmentInstance
    ) -> None:
        self._core = core
        self._endpoint = endpoint
        self._num_steps = message.num_steps
        self._turn = asyncio.Lock()
        self.name = message.name
        self.observation = _decode_observation(message.observation)
        """The last observation that arrived."""

    def step(self, action: str | Sequence[int]) -> ResultFuture[StepResult]:
        """Act, with text or with token ids. Calls are applied one after the other.

        Returns:
            A future of observation, reward and whether the episode has ended.

        Raises:
            NotFoundError: From `result()`, if the instance expired.
            AbortedError: From `result()`, if the environment's code failed
                (`ENVIRONMENT_FAILED`).

        Example:
            >>> step = instance.step("7").result()
        """
        message = (
            trajectories_pb2.Action(text=action)
            if isinstance(action, str)
            else trajectories_pb2.Action(tokens=tensors.encode_tokens(action))
        )
        return self._core.future(self._step(message), what=f"step of {self.name}")

    def delete(self) -> None:
        """Remove the instance; repeating it succeeds.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.
        """
        self._core.background.call(self._delete())

    async def delete_async(self) -> None:
        """Do as `delete`, in the caller's event loop."""
        await self._core.background.acall(self._delete())

    def __enter__(self) -> EnvironmentInstance:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    async def __aenter__(self) -> EnvironmentInstance:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.delete_async()

    async def _step(self, action: trajectories_pb2.Action) -> StepResult:
        async with self._turn:
            request = environment_pb2.StepInstanceRequest(
                instance=self.name, step_index=self._num_steps, action=action
            )
            answer = await self._core.transport.call(
                self._endpoint,
                lambda c: c.environment.StepInstance,
                request,
                timeout_s=self._core.settings.operation_timeout_s,
            )
            self._num_steps += 1
        self.observation = _decode_observation(answer.observation)
        return StepResult(
            observation=self.observation,
            reward=answer.reward,
            done=answer.done,
            info=json_format.MessageToDict(answer.info),
        )

    async def _delete(self) -> None:
        await self._core.transport.call(
            self._endpoint,
            lambda c: c.environment.DeleteInstance,
            environment_pb2.DeleteInstanceRequest(name=self.name),
        )


class EnvironmentCalls:
    """The environments of a server.

    Example:
        >>> with client.environments.create_instance("math", seed=7) as instance:
        ...     print(instance.observation.messages, instance.step("42").result().reward)
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._service = LocatedService(
            core,
            lambda server: server.environment_address,
            missing="the server has no environment service",
            remedy="start an environment worker",
        )

    @call
    async def _list(self) -> list[Environment]:
        """Return the environments by name.

        Returns:
            The environments: name and description.

        Raises:
            FailedPreconditionError: If the server has no environment service.

        Example:
            >>> names = [each.name for each in client.environments.list()]
        """
        pages = read_pages(
            self._core.transport,
            await self._service.endpoint(),
            lambda c: c.environment.ListEnvironments,
            environment_pb2.ListEnvironmentsRequest(parent=self._core.project),
        )
        return [
            Environment(
                name=environment.name,
                description=environment.description,
                default_config=json_format.MessageToDict(environment.default_config),
            )
            async for page in pages
            for environment in page.environments
        ]

    @call
    async def _create_instance(
        self, environment: str, *, seed: int = 0, config: Mapping[str, Any] | None = None
    ) -> EnvironmentInstance:
        """Create and reset an instance.

        Args:
            environment: Resource name, or id within the client's project.
            seed: Makes the episode repeatable.
            config: Overrides default settings of the environment.

        Returns:
            The instance, with its first observation.

        Raises:
            InvalidArgumentError: If a setting is unknown or refused.
            NotFoundError: If there is no such environment.

        Example:
            >>> instance = client.environments.create_instance("guessing", seed=1)
        """
        if "/" not in environment:
            environment = str(names.EnvironmentName(self._core.settings.project, environment))
        struct = struct_pb2.Struct()
        struct.update(dict(config or {}))
        request = environment_pb2.CreateInstanceRequest(
            parent=environment, request_id=str(uuid.uuid4()), seed=seed, config=struct
        )
        endpoint = await self._service.endpoint()
        answer = await self._core.transport.call(
            endpoint, lambda c: c.environment.CreateInstance, request
        )
        return EnvironmentInstance(self._core, endpoint, answer)


def _decode_observation(message: trajectories_pb2.Observation) -> Observation:
    return Observation(
        messages=[{"role": item.role, "content": item.content} for item in message.messages],
        images=[ImageChunk(data=image.data, format=image.format) for image in message.images],
    )
