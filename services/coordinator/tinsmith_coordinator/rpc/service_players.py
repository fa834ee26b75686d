"""Plays episodes with the client's own code: its runner, its sampler, its instances.

So an episode that the server plays has the bits of one that a client plays. Calls carry the key of
the pod, and name sessions and environments of one project, whose right to them was checked before.
They run in an event loop of their own: rendering and encoding a conversation takes time, which
other calls to the coordinator do not wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cached_property, partial

import grpc.aio

from tinsmith.environments.environment_forms import EnvironmentClient
from tinsmith.rollouts import (
    ChatTemplateError,
    Play,
    PlayFailure,
    RolloutRunner,
    SamplerFailedError,
    TemplateRewritesHistoryError,
    failure_of,
)
from tinsmith.rollouts.adapters import (
    ServiceSampler,
    create_service_instance,
    read_image_rules,
)
from tinsmith.rollouts.groups import SAMPLER_FAILED
from tinsmith.rollouts.trajectory_codec import encode_trajectory
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.event_loop_thread import BackgroundLoop
from tinsmith.rpc.transport import Connection, Transport
from tinsmith.sampling.opening import attach_sampler
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.settings import ClientSettings
from tinsmith.text.named_templates import NAMED_TEMPLATES
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.v1 import (
    environment_pb2_grpc,
    rollout_pb2,
    sampler_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from tinsmith_coordinator.rollouts.players import Played
from tinsmith_coordinator.rpc import rollout_codec
from tinsmith_coordinator.store.rollout_records import NewBatch
from tinsmith_runtime.errors import (
    ChatTemplateRefusedError,
    EnvironmentNotFoundError,
    ErrorCode,
    FailedPreconditionError,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole

_MAX_TOKENIZERS = 16
# What every play of a batch would meet. The rest may pass, or belongs to one episode.
_FATAL_CODES = frozenset(
    {
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.NOT_FOUND,
        ErrorCode.FAILED_PRECONDITION,
        ErrorCode.PERMISSION_DENIED,
        ErrorCode.UNAUTHENTICATED,
        ErrorCode.UNIMPLEMENTED,
        ErrorCode.DATA_LOSS,
    }
)


class PodConnection(Connection):
    """Channels to one address: one for each role that a pod there may have.

    Args:
        address: `host:port`.
        credentials: Of this pod.
    """

    def __init__(self, address: str, credentials: PodCredentials) -> None:
        self.address = address
        self._credentials = credentials
        self._channels: dict[PodRole, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close()

    @cached_property
    def scheduler(self) -> scheduler_pb2_grpc.SchedulerServiceAsyncStub:
        """Stub of the scheduler."""
        return scheduler_pb2_grpc.SchedulerServiceStub(self._channel(PodRole.SCHEDULER))

    @cached_property
    def sampler(self) -> sampler_pb2_grpc.SamplerServiceAsyncStub:
        """Stub of a sampler."""
        return sampler_pb2_grpc.SamplerServiceStub(self._channel(PodRole.SAMPLER))

    @cached_property
    def environment(self) -> environment_pb2_grpc.EnvironmentServiceAsyncStub:
        """Stub of an environment server."""
        return environment_pb2_grpc.EnvironmentServiceStub(self._channel(PodRole.ENVIRONMENT))

    def _channel(self, role: PodRole) -> grpc.aio.Channel:
        if role not in self._channels:
            self._channels[role] = self._credentials.open_channel(self.address, role)
        return self._channels[role]


class ServicePlayers:
    """Plays for any project, over the sampler and environment pods of the deployment.

    Args:
        scheduler_address: `host:port` of the scheduler, which knows where they are.
        credentials: Of the coordinator.
    """

    def __init__(self, scheduler_address: str, credentials: PodCredentials) -> None:
        self._settings = ClientSettings(address=scheduler_address, api_key=str(credentials.key))
        self._transport = Transport(
            self._settings, lambda address: PodConnection(address, credentials)
        )
        self._tokenizers = SamplerTokenizers()

    @cached_property
    def _background(self) -> BackgroundLoop:
        return BackgroundLoop()

    async def close(self) -> None:
        """Close all connections; what plays still is cut off."""
        if "_background" in self.__dict__:
            await self._background.acall(self._transport.close())
            await asyncio.to_thread(self._background.close)

    async def check(self, project: str, new: NewBatch) -> None:
        """Refuse a batch that no play could begin; see `Players`."""
        await self._background.acall(self._check(self._core(project), new))

    async def open(self, project: str, content: bytes) -> ServicePlayer:
        """Return what plays a batch; see `Players`."""
        request = rollout_pb2.GenerateRolloutsRequest.FromString(content)
        return await self._background.acall(self._open(self._core(project), request))

    def _core(self, project: str) -> ClientCore:
        settings = ClientSettings(
            address=self._settings.address, api_key=self._settings.api_key, project=project
        )
        return ClientCore(settings, transport=self._transport, background=self._background)

    async def _check(self, core: ClientCore, new: NewBatch) -> None:
        sampler = await attach_sampler(core, new.sampling_session)
        template = sampler.chat_template
        if template and template not in NAMED_TEMPLATES.values():
            # A program of the run's owner would hold up the episodes of all projects.
            raise ChatTemplateRefusedError(
                "the run has a chat template of its own, which is not executed here; play its "
                "episodes in the client"
            )
        try:
            served = {each.name for each in await EnvironmentClient(core).list_async()}
        except FailedPreconditionError as error:
            raise WorkerUnavailableError(f"{error.message}; send the request again") from error
        if new.environment not in served:
            short = sorted(each.rpartition("/")[2] for each in served)
            raise EnvironmentNotFoundError(
                f"environment {new.environment} is not served; there are {', '.join(short)}",
                environment=new.environment,
            )

    async def _open(
        self, core: ClientCore, request: rollout_pb2.GenerateRolloutsRequest
    ) -> ServicePlayer:
        sampler = await attach_sampler(
            core,
            request.sampling_session,
            min_version=request.min_version,
            max_staleness=request.max_staleness,
        )
        runner = RolloutRunner(
            await self._tokenizers.of(core, sampler),
            ServiceSampler(sampler),
            rollout_codec.decode_config(request),
            params=rollout_codec.decode_params(request.params),
            images=await read_image_rules(core, sampler),
        )
        return ServicePlayer(self._background, EnvironmentClient(core), runner, request)


class SamplerTokenizers:
    """Tokenizers of samplers; each is built once for each version of its files.

    One with a template by name is built each time: it is as rare as it is quick.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, str], tuple[str, Tokenizer]] = {}

    async def of(self, core: ClientCore, sampler: Sampler) -> Tokenizer:
        """Return the tokenizer of a sampler.

        A pool of a job may serve another model of the same name.
        """
        key = (core.project, sampler.pool, sampler.base_model)
        digest, tokenizer = self._kept.get(key, ("", None))
        answer = await core.transport.call(
            core.scheduler,
            lambda c: c.scheduler.GetTokenizer,
            scheduler_pb2.GetTokenizerRequest(
                base_model=sampler.base_model,
                known_digest=digest,
                project=core.settings.project,
                pool=sampler.pool,
            ),
        )
        if tokenizer is None or answer.digest != digest:
            tokenizer = await asyncio.to_thread(Tokenizer, dict(answer.files))
            while len(self._kept) >= _MAX_TOKENIZERS:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = (answer.digest, tokenizer)
        if sampler.chat_template:
            return await asyncio.to_thread(tokenizer.with_chat_template, sampler.chat_template)
        return tokenizer


class ServicePlayer:
    """Plays the episodes of one batch.

    Args:
        background: Where they are played.
        environments: Makes instances, as the project.
        runner: Plays with the sampler of the batch.
        request: What is played.
    """

    def __init__(
        self,
        background: BackgroundLoop,
        environments: EnvironmentClient,
        runner: RolloutRunner,
        request: rollout_pb2.GenerateRolloutsRequest,
    ) -> None:
        self._background = background
        self._environments = environments
        self._runner = runner
        self._environment = request.environment
        self._batch_key = request.batch_key
        self._tasks = rollout_codec.decode_tasks(request)

    async def play(self, play: Play) -> Played:
        """Play one episode; see `EpisodePlayer`."""
        return await self._background.acall(self._play(play))

    async def _play(self, play: Play) -> Played:
        task = self._tasks[play.task]
        config: Mapping[str, object] | None = task.config or None
        create = partial(
            create_service_instance,
            self._environments,
            self._environment,
            seed=task.seed,
            config=config,
        )
        try:
            trajectory = await self._runner.run(create, episode_key=play.key(self._batch_key))
        except (ChatTemplateError, TemplateRewritesHistoryError) as error:
            raise ChatTemplateRefusedError(error.message) from error
        except SamplerFailedError as error:
            cause = error.__cause__
            if isinstance(cause, TinsmithError) and cause.code in _FATAL_CODES:
                raise cause from error
            return Played(failure=PlayFailure(SAMPLER_FAILED, str(error)))
        failure = failure_of(trajectory)
        kept = trajectory if failure is None else failure.trajectory
        content = encode_trajectory(kept).SerializeToString(deterministic=True) if kept else b""
        return Played(content, trajectory.num_sampled_tokens, failure)
