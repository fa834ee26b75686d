"""Environments that are played: `Client.environments`; `play_forms.py` has the forms."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from tinsmith.environments.environment_forms import EnvironmentClient
from tinsmith.environments.local import STEP_TIMEOUT_S, create_local_instance
from tinsmith.environments.naming import AnyEnvironment, NamedEnvironment
from tinsmith.errors import ConfigurationError
from tinsmith.rollouts.adapters import (
    ServiceSampler,
    create_service_instance,
    read_image_rules,
)
from tinsmith.rollouts.batch_codec import EnvironmentTask
from tinsmith.rollouts.errors import NoRolloutsError, RolloutError
from tinsmith.rollouts.group_plan import GroupConfig
from tinsmith.rollouts.groups import GroupResult, run_groups
from tinsmith.rollouts.interfaces import EnvironmentInstance
from tinsmith.rollouts.keeping import (
    KeepResult,
    keep_before_error,
    keep_in_file,
    keep_nothing,
    kind_of,
    seeded,
)
from tinsmith.rollouts.machine import RolloutConfig
from tinsmith.rollouts.records.record import SERVED, EpisodeRecord
from tinsmith.rollouts.records.replaying import (
    Replay,
    check_replayable,
    columns_of,
    compare,
    rollout_config,
    sample_turns,
    sampling_params,
)
from tinsmith.rollouts.rollout_forms import RolloutClient
from tinsmith.rollouts.runner import RolloutRunner
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import SamplingParams

Place = Literal["client", "server"]
_GRACE_S = 60.0
"""For the server to notice its deadline."""
PLACES: tuple[Place, ...] = ("client", "server")
"""Where episodes may be played."""


def check_place(named: NamedEnvironment, rollouts: str) -> None:
    """Refuse a place where an environment cannot be played.

    Raises:
        ConfigurationError: If it is none of `PLACES`, or the server does not find the environment.
    """
    if rollouts not in PLACES:
        raise ConfigurationError(
            f"rollouts is {rollouts!r}", remedy=f"give one of {', '.join(PLACES)}"
        )
    if rollouts == "server" and not named.is_at_scheduler:
        raise ConfigurationError(
            f"{named.given} is not played on the server, which finds environments by their name",
            remedy="set rollouts=client, or name one that is served: tinsmith environments list",
        )


class PlayCalls(EnvironmentClient):
    """The environments of a server, and playing them with a model.

    Example:
        >>> sampler = client.create_sampler(base_model="tiny")
        >>> played = client.environments.play("guessing", sampler=sampler, seeds=range(32))
        >>> print(sum(group.rewards[0] for group in played.groups) / 32)
    """

    def __init__(self, core: ClientCore) -> None:
        super().__init__(core)
        self._rollouts = RolloutClient(core)
        self._tokenizers: dict[tuple[str, str], Tokenizer] = {}

    @call
    async def _play(
        self,
        environment: AnyEnvironment,
        *,
        sampler: Sampler,
        seeds: Sequence[int | EnvironmentTask] = (0,),
        config: RolloutConfig | None = None,
        params: SamplingParams | None = None,
        groups: GroupConfig | None = None,
        batch_key: str = "",
        rollouts: Place = "client",
        timeout_s: float = 3600.0,
        keep_in: Path | str | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> GroupResult[EnvironmentTask]:
        """Play an environment with a model; training, validation and inference all do this.

        What is done with the result is all that tells them apart. The same seeds give the same
        tokens, log-probabilities and rewards in the client and on the server.

        Args:
            environment: A served name; `FILE.py:CLASS`, `MODULE:CLASS` or a class, which play in
                this process; or `grpc://HOST:PORT[/NAME]` of a server of `tinsmith env serve`.
            sampler: Whose weights play: a base model, a checkpoint or a live run.
            seeds: What is played: seeds of the environment, or seeds with settings.
            config: Limits of an episode.
            params: How tokens are drawn; `seed`, if given, is mixed with the place of the episode.
            groups: How many episodes are played; one of each seed by default.
            batch_key: Tells the random draws of this batch from those of others.
            rollouts: Where episodes are played: `client` or `server`.
            timeout_s: Time that a server gives the whole.
            keep_in: File, `.jsonl` or `.parquet`, that the episodes of the groups are written to
                (docs/rollouts.md). Without a seed in `params` one is drawn.
            step_timeout_s: What making a class of this process, its reset and each step may take.

        Returns:
            A group for each seed, and what became of the episodes.

        Raises:
            ConfigurationError: If the environment is not there, `rollouts` is no place or not one
                for it, or `keep_in` is no name of such a file.
            NoRolloutsError: If not one group survived.

        Example:
            >>> played = client.environments.play("guessing", sampler=sampler, seeds=range(32))
        """
        named = await self._find(environment)
        check_place(named, rollouts)
        groups = groups or GroupConfig(group_size=1, min_group_size=1)
        if rollouts == "server":
            batch = await self._rollouts.generate_async(
                named.given,
                seeds,
                sampler=sampler,
                config=config,
                params=params,
                groups=groups,
                batch_key=batch_key,
                timeout_s=timeout_s,
                keep_in=keep_in,
            )
            try:
                return await batch.result_async(timeout_s + _GRACE_S)
            finally:
                # Also where the caller was interrupted: what is not waited for is not played.
                await batch.delete_async()
        tasks = [
            each if isinstance(each, EnvironmentTask) else EnvironmentTask(int(each))
            for each in seeds
        ]
        config, params = config or RolloutConfig(), params or SamplingParams()
        keep: KeepResult = keep_nothing
        tokenizer = await self._tokenizer(sampler)
        if keep_in is not None:
            params = seeded(params)
            keep = keep_in_file(
                keep_in,
                tokenizer,
                sampler,
                environment=named.given,
                params=params,
                config=config,
                kind=kind_of(named),
            )
        runner = await self._runner(sampler, ServiceSampler(sampler), config, params)
        create = partial(self._instance, named, step_timeout_s)
        try:
            result = await run_groups(runner, tasks, create, groups, batch_key=batch_key)
        except NoRolloutsError as error:
            await asyncio.to_thread(keep_before_error, keep, error.unused)
            raise
        await asyncio.to_thread(keep, result)
        return result

    @call
    async def _replay(
        self,
        record: EpisodeRecord,
        *,
        sampler: Sampler,
        environment: AnyEnvironment | None = None,
    ) -> Replay:
        """Play a recorded episode again, and compare it token by token.

        An episode of a served environment is played anew from its seed. Of other episodes, whose
        environment only their recipe had, each turn is sampled again from its recorded context.

        Args:
            record: The episode, of `tinsmith.rollouts.records.read_records`.
            sampler: Of the weights that played it.
            environment: What plays instead of the served environment that the record names. A
                record that names an address needs it: a file does not choose what this process
                calls.

        Returns:
            Where the two part, and which weights sampled each.

        Raises:
            ConfigurationError: If the episode cannot be played again, as its environment is not
                served any more; says why.
            RolloutError: If the episode was lost on the way.

        Example:
            >>> [record] = read_records("played.jsonl")
            >>> client.environments.replay(record, sampler=sampler).is_same
        """
        check_replayable(record)
        origin = record.origin
        draw = ServiceSampler(sampler, origin.num_samples, origin.sample_index)
        if origin.kind != SERVED:
            return compare(record, await sample_turns(record, draw))
        config, params = rollout_config(record), sampling_params(record)
        runner = await self._runner(sampler, draw, config, params)
        task = EnvironmentTask(origin.environment_seed or 0, origin.environment_config)
        named = await self._find(
            _served_name(origin.environment) if environment is None else environment,
            setting="the record's environment" if environment is None else "environment",
        )
        create = partial(self._instance, named, STEP_TIMEOUT_S, task)
        played = await runner.run(create, episode_key=record.episode)
        if played.reason.is_infrastructure and played.reason.value != record.reason:
            raise RolloutError(f"the episode {record.episode} was lost: {played.failure}")
        return compare(record, columns_of(played))

    async def _runner(
        self, sampler: Sampler, draw: ServiceSampler, config: RolloutConfig, params: SamplingParams
    ) -> RolloutRunner:
        return RolloutRunner(
            await self._tokenizer(sampler),
            draw,
            config,
            params=params,
            images=await read_image_rules(self._core, sampler),
        )

    async def _instance(
        self, named: NamedEnvironment, step_timeout_s: float, task: EnvironmentTask
    ) -> EnvironmentInstance:
        config = task.config or None
        if named.environment_class is not None:
            return await create_local_instance(
                named.environment_class,
                seed=task.seed,
                config=config,
                step_timeout_s=step_timeout_s,
            )
        return await create_service_instance(
            self, named.name, seed=task.seed, config=config, address=named.address
        )

    async def _tokenizer(self, sampler: Sampler) -> Tokenizer:
        """Return the tokenizer of a sampler; building one takes long where it has many words."""
        key = (sampler.base_model, sampler.chat_template)
        tokenizer = self._tokenizers.get(key)
        if tokenizer is None:
            tokenizer = self._tokenizers[key] = await self._core.get_tokenizer(*key)
        return tokenizer


def _served_name(word: str) -> str:
    """Return a record's environment, if it is the name of a served one."""
    if ":" in word:
        raise ConfigurationError(
            f"the record was played on {word!r}, which a file does not choose",
            remedy="give environment= (--environment), if you trust what it names",
        )
    return word
