"""The service as sampler and environment of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.environments.environment import Action
from tinsmith.environments.environment_calls import EnvironmentInstance, StepResult
from tinsmith.environments.environment_forms import EnvironmentClient
from tinsmith.images import ImageRules
from tinsmith.rollouts.interfaces import Completion
from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.types import ModelInput, SamplingParams
from tinsmith.v1 import scheduler_pb2


class ServiceSampler:
    """A `tinsmith.Sampler` as the sampler of rollouts.

    Args:
        sampler: The sampler.
        num_samples: Completions that each request draws.
        index: Which of them is the turn.
    """

    def __init__(self, sampler: Sampler, num_samples: int = 1, index: int = 0) -> None:
        self._sampler = sampler
        self._num_samples = num_samples
        self._index = index

    async def sample_async(self, prompt: ModelInput, params: SamplingParams) -> Completion:
        """Return one completion."""
        result = await self._sampler.sample(
            prompt, sampling_params=params, num_samples=self._num_samples
        )
        return result.sequences[self._index]


class ServiceInstance:
    """A `tinsmith.EnvironmentInstance` as the environment of a rollout."""

    def __init__(self, instance: EnvironmentInstance) -> None:
        self._instance = instance
        self.observation = instance.observation
        self.action_kinds = instance.action_kinds

    async def step_async(self, action: str | Action) -> StepResult:
        """Apply an action."""
        return await self._instance.step(action)

    async def delete_async(self) -> None:
        """Release the instance."""
        await self._instance.delete_async()


async def create_service_instance(
    environments: EnvironmentClient,
    environment: str,
    *,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    address: str = "",
) -> ServiceInstance:
    """Create an instance on the server for one rollout; see `EnvironmentClient`."""
    instance = await environments.create_instance_async(
        environment, seed=seed, config=config, address=address
    )
    return ServiceInstance(instance)


async def read_image_rules(core: ClientCore, sampler: Sampler) -> ImageRules | None:
    """Return how the model of a sampler turns images into tokens; None if it reads none.

    A pool of a job may serve another model of the same name.
    """
    request = scheduler_pb2.GetCapabilitiesRequest(parent=core.project, pool=sampler.pool)
    answer = await core.transport.call(
        core.scheduler, lambda c: c.scheduler.GetCapabilities, request
    )
    models = map(codec.decode_served_model, answer.models)
    return next((each.images for each in models if each.base_model == sampler.base_model), None)
