"""Sampling from a base model, a checkpoint, or the live weights of a run."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tinsmith import codec, tensors
from tinsmith.errors import ConfigurationError
from tinsmith.futures import ResultFuture
from tinsmith.tokenizer import Tokenizer
from tinsmith.transport import Endpoint
from tinsmith.types import FloatArray, ModelInput, SampleResult, SamplingParams
from tinsmith.v1 import sampler_pb2, scheduler_pb2, trajectories_pb2

if TYPE_CHECKING:
    from tinsmith.core import ClientCore
    from tinsmith.training_run import TrainingRun


class Sampler:
    """A handle to sample with; lives as long as its client."""

    def __init__(
        self,
        core: ClientCore,
        message: scheduler_pb2.SamplingSession,
        endpoint: Endpoint,
        run: TrainingRun | None = None,
    ) -> None:
        self._core = core
        self._endpoint = endpoint
        self._run = run
        self.name = message.name
        self.base_model = message.base_model
        self.checkpoint = message.checkpoint

    def __repr__(self) -> str:
        return f"Sampler({self.name!r}, base_model={self.base_model!r})"

    def sample(
        self,
        prompt: ModelInput | Sequence[int],
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> ResultFuture[SampleResult]:
        """Draw completions of one prompt.

        A request that was cut off is sent again with the same seed, so it gives the same tokens.

        Args:
            prompt: What the model reads.
            sampling_params: How tokens are drawn.
            num_samples: Number of completions, each with a random stream of its own.
            prompt_logprobs: Whether to score the prompt too.
            topk_prompt_logprobs: Number of most probable tokens to list at each prompt position.
        """
        request = sampler_pb2.SampleRequest(
            sampling_session=self.name,
            prompt=_encode_prompt(prompt),
            num_samples=num_samples,
            params=codec.encode_sampling_params(
                sampling_params or SamplingParams(), seed=secrets.randbits(63)
            ),
            prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            min_version=self._min_version(),
        )
        return self._core.future(self._sample(request), what=f"sample from {self.name}")

    def compute_logprobs(self, prompt: ModelInput | Sequence[int]) -> ResultFuture[FloatArray]:
        """Score each token of a sequence given those before it.

        Returns:
            A future of natural-log probabilities, float32 [T], NaN at position 0.
        """
        request = sampler_pb2.ComputeLogprobsRequest(
            sampling_session=self.name,
            input=_encode_prompt(prompt),
            min_version=self._min_version(),
        )
        return self._core.future(self._compute_logprobs(request), what=f"score by {self.name}")

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the base model."""
        return self._core.background.call(self._core.get_tokenizer(self.base_model))

    async def get_tokenizer_async(self) -> Tokenizer:
        """Do as `get_tokenizer`, in the caller's event loop."""
        return await self._core.background.acall(self._core.get_tokenizer(self.base_model))

    def _min_version(self) -> int:
        return 0 if self._run is None else self._run.version

    async def _sample(self, request: sampler_pb2.SampleRequest) -> SampleResult:
        response = await self._core.transport.call(
            self._endpoint,
            lambda c: c.sampler.Sample,
            request,
            timeout_s=self._core.settings.operation_timeout_s,
        )
        return codec.decode_sample(response)

    async def _compute_logprobs(self, request: sampler_pb2.ComputeLogprobsRequest) -> FloatArray:
        response = await self._core.transport.call(
            self._endpoint,
            lambda c: c.sampler.ComputeLogprobs,
            request,
            timeout_s=self._core.settings.operation_timeout_s,
        )
        return tensors.decode_tensor(response.logprobs).astype(np.float32)


async def create_sampler(
    core: ClientCore,
    *,
    base_model: str = "",
    checkpoint: str = "",
    run: TrainingRun | str | None = None,
) -> Sampler:
    """Open a sampling session. Runs in the background loop.

    Raises:
        ConfigurationError: Unless exactly one source is given.
    """
    if sum(map(bool, (base_model, checkpoint, run))) != 1:
        raise ConfigurationError(
            "a sampler needs one source", remedy="give base_model=, checkpoint= or run="
        )
    request = scheduler_pb2.CreateSamplingSessionRequest(
        parent=core.session.name, request_id=str(uuid.uuid4())
    )
    if base_model:
        request.base_model = base_model
    elif checkpoint:
        request.checkpoint = checkpoint
    elif run is not None:
        request.run = core.run_name(run) if isinstance(run, str) else run.name
    message = await core.transport.call(
        core.scheduler, lambda c: c.scheduler.CreateSamplingSession, request
    )

    async def locate() -> str:
        found = await core.transport.call_once(
            core.scheduler,
            lambda c: c.scheduler.GetSamplingSession,
            scheduler_pb2.GetSamplingSessionRequest(name=message.name),
            timeout_s=10,
        )
        return found.sampler_address

    endpoint = Endpoint(message.sampler_address or core.settings.address, locate)
    return Sampler(core, message, endpoint, None if isinstance(run, str) else run)


def _encode_prompt(prompt: ModelInput | Sequence[int]) -> trajectories_pb2.ModelInput:
    value = prompt if isinstance(prompt, ModelInput) else ModelInput.from_ints(prompt)
    return codec.encode_model_input(value)
