"""The service as sampler and environment of rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.environments.client import EnvironmentClient
from tinsmith.environments.environment_calls import EnvironmentInstance, StepResult
from tinsmith.rollouts.interfaces import Completion
from tinsmith.sampling.sampler import Sampler
from tinsmith.types import SamplingParams


class ServiceSampler:
    """A `tinsmith.Sampler` as the sampler of rollouts."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def sample_async(
        self, prompt_tokens: Sequence[int], params: SamplingParams
    ) -> Completion:
        """Return one completion."""
        result = await self._sampler.sample(
            list(prompt_tokens), sampling_params=params, num_samples=1
        )
        return result.sequences[0]


class ServiceInstance:
    """A `tinsmith.EnvironmentInstance` as the environment of a rollout."""

    def __init__(self, instance: EnvironmentInstance) -> None:
        self._instance = instance
        self.observation = instance.observation

    async def step_async(self, text: str) -> StepResult:
        """Apply an action."""
        return await self._instance.step(text)

    async def delete_async(self) -> None:
        """Release the instance."""
        await self._instance.delete_async()


async def create_service_instance(
    environments: EnvironmentClient,
    environment: str,
    *,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> ServiceInstance:
    """Create an instance on the server for one rollout."""
    instance = await environments.create_instance_async(environment, seed=seed, config=config)
    return ServiceInstance(instance)
