"""Rollouts that the server plays; `rollout_forms.py` has the forms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinsmith.names import EnvironmentName
from tinsmith.rollouts.batch import RolloutBatch
from tinsmith.rollouts.batch_codec import EnvironmentTask, encode_request
from tinsmith.rollouts.group_plan import GroupConfig
from tinsmith.rollouts.keeping import KeepResult, keep_in_file, keep_nothing, seeded
from tinsmith.rollouts.machine import RolloutConfig
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.rpc.located_service import LocatedService
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.types import SamplingParams


class RolloutCalls:
    """Rollouts that the server plays, near its samplers.

    Example:
        >>> batch = client.rollouts.generate("guessing", range(8), sampler=run.sampler())
        >>> groups = batch.result().groups
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._service = LocatedService.of_coordinator(
            core, ", or play in the client with run_groups"
        )

    @call
    async def _generate(
        self,
        environment: str,
        tasks: Sequence[int | EnvironmentTask],
        *,
        sampler: Sampler,
        config: RolloutConfig | None = None,
        params: SamplingParams | None = None,
        groups: GroupConfig | None = None,
        batch_key: str = "",
        timeout_s: float = 3600.0,
        keep_in: Path | str | None = None,
    ) -> RolloutBatch:
        """Have the server play groups of episodes; returns once it took the batch on.

        The same seeds give the tokens, log-probabilities and rewards of `run_groups` in the client.
        Over-sampled groups are the exception: which episodes are first depends on time.

        Args:
            environment: Resource name, or id within the client's project.
            tasks: What is played: seeds of the environment, or seeds with settings.
            sampler: Whose weights play.
            config: Limits of an episode; a `parse_error_reward` has no meaning here, since the
                environment reads the text of a turn.
            params: How tokens are drawn; `seed`, if given, is mixed with the place of the episode.
            groups: How many episodes are played, and how failures are met.
            batch_key: Tells the random draws of this batch from those of others.
            timeout_s: Time that the server gives the whole, 1 s to 1 day.
            keep_in: File, `.jsonl` or `.parquet`, that the episodes of the groups are written to
                before the result is there. Without a seed in `params` one is drawn.

        Returns:
            The batch: a future of its groups.

        Raises:
            ConfigurationError: If `keep_in` is no name of such a file.
            NotFoundError: If the environment is not served, or the sampler is not of this project.
            InvalidArgumentError: If a setting is out of range.
            ResourceExhaustedError: If the project has too much under way.

        Example:
            >>> batch = client.rollouts.generate("guessing", range(8), sampler=run.sampler())
        """
        config, params = config or RolloutConfig(), params or SamplingParams()
        keep: KeepResult = keep_nothing
        if keep_in is not None:
            params = seeded(params)
            keep = keep_in_file(
                keep_in,
                await sampler.get_tokenizer_async(),
                sampler,
                environment=environment,
                params=params,
                config=config,
            )
        if "/" not in environment:
            environment = str(EnvironmentName(self._core.settings.project, environment))
        groups = groups or GroupConfig()
        chosen = [
            each if isinstance(each, EnvironmentTask) else EnvironmentTask(int(each))
            for each in tasks
        ]
        request = encode_request(
            parent=self._core.project,
            sampling_session=sampler.name,
            environment=environment,
            tasks=chosen,
            config=config,
            params=params,
            groups=groups,
            batch_key=batch_key,
            min_version=sampler.min_version,
            max_staleness=sampler.max_staleness,
            timeout_s=timeout_s,
        )
        endpoint = await self._service.endpoint()
        operation = await self._core.transport.call(
            endpoint, lambda c: c.coordinator.GenerateRollouts, request
        )
        return RolloutBatch(
            self._core,
            endpoint,
            operation,
            chosen,
            groups,
            batch_key=batch_key,
            keep=keep,
            note_episode=sampler.note_answer,
        )
