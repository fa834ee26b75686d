"""Environments on the server: listed, created, stepped; `environment_forms.py` has the forms."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format, struct_pb2

from tinsmith import names
from tinsmith.environments.environment import TEXT_ALONE, Action
from tinsmith.environments.naming import (
    AnyEnvironment,
    NamedEnvironment,
    choose_served,
    read_environment,
)
from tinsmith.environments.observation_codec import (
    decode_action_kinds,
    decode_chat_message,
    decode_stop,
    decode_tokens,
    decode_tool,
    encode_action,
)
from tinsmith.environments.step_streams import StepStreams
from tinsmith.errors import ConfigurationError, ErrorCode, TinsmithError
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.rpc.futures import ResultFuture
from tinsmith.rpc.input_codec import decode_image
from tinsmith.rpc.lists import read_pages
from tinsmith.rpc.located_service import LocatedService
from tinsmith.rpc.transport import PASSING_CODES, Endpoint
from tinsmith.settings import RetryPolicy
from tinsmith.types import ImageChunk
from tinsmith.v1 import environment_pb2, trajectories_pb2

_MAX_STARTING = 16
_ADDRESS_BUDGET_S = 10.0
"""For a server at an address to answer first: nothing is lost yet that would be waited for."""
_NO_ENVIRONMENT_CODES = (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.UNIMPLEMENTED)
"""Of a port that another server listens at, or that swallows what is sent."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A task that can be played."""

    name: str
    description: str
    default_config: dict[str, Any]
    is_builtin: bool = False
    """Whether each environment server plays it, whatever it was started with."""
    action_kinds: frozenset[str] = TEXT_ALONE
    """Kinds of actions that it understands: `text`, `tokens`, `tool_calls`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows to the agent."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """With `role` and `content`, to append to the conversation; empty after the last step.

    A content is a text, or a list of texts and places of images, as chat templates read it.
    """
    images: list[ImageChunk] = field(default_factory=list)
    """In the order of their places."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of the tools of the episode; of its first observation only."""
    stop: tuple[str | int, ...] = ()
    """Where the next action ends, as at the model's end of turn: strings and token ids."""
    tokens: tuple[int, ...] = ()
    """Token ids that follow the prompt so far as they are, in place of all but `stop`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to."""

    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EnvironmentStatistics:
    """What the episodes of one job in one environment came to, on one server."""

    environment: str
    job: str
    """Empty for episodes without one."""
    num_episodes: int
    num_finished: int
    num_abandoned: int
    """Removed or expired before their end."""
    num_failures: dict[str, int]
    """By cause: `raised`, `timeout`, `crashed`, `stopped`."""
    num_steps: int
    step_time_p50_s: float
    """Of the last 2,048 steps, the wait for the worker process included."""
    step_time_p99_s: float
    mean_reward: float
    """Over the finished episodes, of the sum of their rewards."""
    start_time: datetime.datetime
    """Since when it is counted."""


class EnvironmentInstance:
    """One play of an environment. Usable as a context manager, which deletes it at the end."""

    def __init__(
        self,
        core: ClientCore,
        endpoint: Endpoint,
        streams: StepStreams,
        message: environment_pb2.EnvironmentInstance,
    ) -> None:
        self._core = core
        self._endpoint = endpoint
        self._streams = streams
        self._num_steps = message.num_steps
        self._turn = asyncio.Lock()
        self.name = message.name
        self.observation = _decode_observation(message.observation)
        """The last observation that arrived."""
        self.action_kinds = decode_action_kinds(message.action_kinds)
        """Kinds of actions that it understands: `text`, `tokens`, `tool_calls`."""

    def step(self, action: str | Sequence[int] | Action) -> ResultFuture[StepResult]:
        """Act, with text, token ids or calls of tools. Steps are applied one after the other.

        Returns:
            A future of observation, reward and whether the episode has ended.

        Raises:
            NotFoundError: From `result()`, if the instance expired.
            AbortedError: From `result()`, if the environment's code failed
                (`ENVIRONMENT_FAILED`).

        Example:
            >>> step = instance.step("7").result()
        """
        return self._core.future(self._step(encode_action(action)), what=f"step of {self.name}")

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
            answer = await self._streams.step(self._endpoint, request)
            self._num_steps += 1
            if answer.done:
                self._streams.release(self._endpoint, self.name)
        self.observation = _decode_observation(answer.observation)
        return StepResult(
            observation=self.observation,
            reward=answer.reward,
            done=answer.done,
            info=json_format.MessageToDict(answer.info),
        )

    async def _delete(self) -> None:
        self._streams.release(self._endpoint, self.name)
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
        self._streams = StepStreams(core)
        self._starting = asyncio.Semaphore(_MAX_STARTING)
        # Streams are told apart by their endpoint, so each address has one.
        self._addressed: dict[str, Endpoint] = {}

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
        return await self._list_at(await self._service.endpoint())

    @call
    async def _find(
        self, environment: AnyEnvironment, *, setting: str = "environment"
    ) -> NamedEnvironment:
        """Return what `environment=` names, once it is known to be there.

        Args:
            environment: A served name, `FILE.py:CLASS` or `MODULE:CLASS` of this process,
                `grpc://HOST:PORT[/NAME]` of a server of `tinsmith env serve`, or a class. Without
                a name an address means the one environment that its server was started with.
                What was found already is returned as it is.
            setting: What the value is called in an error.

        Returns:
            The environment; of a served one with its resource name.

        Raises:
            ConfigurationError: If it is none of these, or not there; says what there is.
            FailedPreconditionError: If the server has no environment service.

        Example:
            >>> client.environments.find("guessing").name
        """
        if isinstance(environment, NamedEnvironment):
            return environment
        named = read_environment(environment, setting)
        if named.environment_class is not None:
            return named
        if not named.address:
            served = await self._list_at(await self._service.endpoint())
            return choose_served(named, _builtins(served), setting)
        retry = dataclasses.replace(
            self._core.settings.retry,
            budget_s=min(_ADDRESS_BUDGET_S, self._core.settings.retry.budget_s),
        )
        try:
            served = await self._list_at(self._endpoint_at(named.address), retry)
        except TinsmithError as error:
            if error.code not in (*PASSING_CODES, *_NO_ENVIRONMENT_CODES):
                raise
            raise ConfigurationError(
                f"{setting} is {named.given!r}, where no environment server answers: "
                f"{error.message}",
                remedy=f"start one: tinsmith env serve MODULE:CLASS --listen {named.address}",
            ) from None
        return choose_served(named, _builtins(served), setting)

    async def _list_at(
        self, endpoint: Endpoint, retry: RetryPolicy | None = None
    ) -> list[Environment]:
        pages = read_pages(
            self._core.transport,
            endpoint,
            lambda c: c.environment.ListEnvironments,
            environment_pb2.ListEnvironmentsRequest(parent=self._core.project),
            retry=retry,
        )
        return [
            Environment(
                name=environment.name,
                description=environment.description,
                default_config=json_format.MessageToDict(environment.default_config),
                is_builtin=environment.builtin,
                action_kinds=decode_action_kinds(environment.action_kinds),
            )
            async for page in pages
            for environment in page.environments
        ]

    def _endpoint_at(self, address: str) -> Endpoint:
        """Return the server of an address, which is called there whatever the client's is."""
        return self._addressed.setdefault(address, Endpoint(address, is_direct=True))

    @call
    async def _create_instance(
        self,
        environment: str,
        *,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        job: str = "",
        address: str = "",
    ) -> EnvironmentInstance:
        """Create and reset an instance. It goes with the client: it is removed when that ends.

        Args:
            environment: Resource name, or id within the client's project.
            seed: Makes the episode repeatable.
            config: Overrides default settings of the environment.
            job: What the episode is counted under; the job that this process is of by default.
            address: `host:port` of the environment server; the scheduler is asked by default.

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
            parent=environment,
            request_id=str(uuid.uuid4()),
            seed=seed,
            config=struct,
            client_id=self._streams.client_id,
            job=job or os.environ.get("TINSMITH_JOB", "").rpartition("/")[2],
        )
        endpoint = self._endpoint_at(address) if address else await self._service.endpoint()
        # A crowd that starts at once would be told to come again.
        async with self._starting:
            answer = await self._core.transport.call(
                endpoint, lambda c: c.environment.CreateInstance, request
            )
        self._streams.hold(endpoint, answer)
        return EnvironmentInstance(self._core, endpoint, self._streams, answer)

    @call
    async def _statistics(self, job: str = "") -> list[EnvironmentStatistics]:
        """Return what episodes came to, by job and environment.

        Each environment server counts its own, since its start or the last reset. Of several
        servers behind one address, one answers.

        Args:
            job: Name of a job; all by default.

        Returns:
            The statistics of each job and environment.

        Raises:
            FailedPreconditionError: If the server has no environment service.

        Example:
            >>> rewards = {each.job: each.mean_reward for each in client.environments.statistics()}
        """
        pages = read_pages(
            self._core.transport,
            await self._service.endpoint(),
            lambda c: c.environment.ListEnvironmentStatistics,
            environment_pb2.ListEnvironmentStatisticsRequest(parent=self._core.project, job=job),
        )
        return [_decode_statistics(each) async for page in pages for each in page.statistics]

    @call
    async def _reset_statistics(self, job: str = "") -> None:
        """Begin to count anew; episodes that are being played are not counted any more.

        Args:
            job: Name of a job; all by default.

        Raises:
            FailedPreconditionError: If the server has no environment service.

        Example:
            >>> client.environments.reset_statistics("warm-up")
        """
        await self._core.transport.call(
            await self._service.endpoint(),
            lambda c: c.environment.ResetEnvironmentStatistics,
            environment_pb2.ResetEnvironmentStatisticsRequest(parent=self._core.project, job=job),
        )


def _builtins(served: Sequence[Environment]) -> dict[str, bool]:
    return {each.name: each.is_builtin for each in served}


def _decode_statistics(message: environment_pb2.EnvironmentStatistics) -> EnvironmentStatistics:
    return EnvironmentStatistics(
        environment=message.environment,
        job=message.job,
        num_episodes=message.num_episodes,
        num_finished=message.num_finished,
        num_abandoned=message.num_abandoned,
        num_failures=dict(message.num_failures),
        num_steps=message.num_steps,
        step_time_p50_s=message.step_time_p50_seconds,
        step_time_p99_s=message.step_time_p99_seconds,
        mean_reward=message.mean_reward,
        start_time=message.start_time.ToDatetime(datetime.UTC),
    )


def _decode_observation(message: trajectories_pb2.Observation) -> Observation:
    return Observation(
        messages=[decode_chat_message(item) for item in message.messages],
        images=[decode_image(image) for image in message.images],
        tools=[decode_tool(tool) for tool in message.tools],
        stop=decode_stop(message),
        tokens=decode_tokens(message),
    )
