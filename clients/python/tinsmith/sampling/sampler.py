"""Sampling from a base model, a checkpoint, or the live weights of a run."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from tinsmith import tensors
from tinsmith.errors import ConfigurationError
from tinsmith.rpc import codec
from tinsmith.rpc.futures import ResultFuture
from tinsmith.rpc.transport import Endpoint
from tinsmith.sampling.sample_stream import SampleStream
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import FloatArray, ModelInput, SampleResult, SamplingParams
from tinsmith.v1 import sampler_pb2, scheduler_pb2, trajectories_pb2

WeightUpdates = Literal["pinned", "in_flight"]

_WEIGHT_UPDATES: dict[str, sampler_pb2.WeightUpdates.ValueType] = {
    "pinned": sampler_pb2.WEIGHT_UPDATES_PINNED,
    "in_flight": sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT,
}

if TYPE_CHECKING:
    from tinsmith.rpc.core import ClientCore
    from tinsmith.training.training_run import TrainingRun


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
        prompt_logprobs_last_n: int | None = None,
        target_prompt_tokens: ArrayLike | None = None,
        num_prompt_alternatives: int = 0,
        topk_sample_logprobs: int = 0,
        weight_updates: WeightUpdates = "pinned",
    ) -> ResultFuture[SampleResult]:
        """Draw completions of one prompt.

        A request that was cut off is sent again with the same seed, so it gives the same tokens.

        Args:
            prompt: What the model reads, T tokens.
            sampling_params: How tokens are drawn.
            num_samples: Number of completions, each with a random stream of its own.
            prompt_logprobs: Whether to score the prompt too.
            topk_prompt_logprobs: Number of most probable tokens to list at each prompt position.
            prompt_logprobs_last_n: Score only this many tokens at the end of the prompt, 1 to
                T - 1.
            target_prompt_tokens: Tokens to score at each prompt position after the first, [T - 1,
                K]; -1 for none.
            num_prompt_alternatives: Number of tokens to draw at each prompt position after the
                first, at the temperature.
            topk_sample_logprobs: Number of most probable tokens to list at each sampled token.
            weight_updates: What becomes of a completion of a live run when the run steps on:
                `pinned` draws all of it from one version, `in_flight` lets newer weights take
                effect between tokens.
        """
        request = self._request(
            prompt,
            sampling_params,
            num_samples,
            prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            target_prompt_tokens=target_prompt_tokens,
            num_prompt_alternatives=num_prompt_alternatives,
            topk_sample_logprobs=topk_sample_logprobs,
            weight_updates=weight_updates,
        )
        return self._core.future(self._sample(request), what=f"sample from {self.name}")

    def stream(
        self,
        prompt: ModelInput | Sequence[int],
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        prompt_logprobs_last_n: int | None = None,
        target_prompt_tokens: ArrayLike | None = None,
        num_prompt_alternatives: int = 0,
        topk_sample_logprobs: int = 0,
        weight_updates: WeightUpdates = "pinned",
    ) -> SampleStream:
        """Draw completions of one prompt and get their tokens as they are drawn.

        The arguments are those of `sample`, and so are the tokens for the same seed. A stream that
        broke off goes on by itself where it was; on a live run that stepped on in between, the rest
        is of the newer weights. Nothing is sent before the first piece is asked for.
        """
        request = self._request(
            prompt,
            sampling_params,
            num_samples,
            prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            target_prompt_tokens=target_prompt_tokens,
            num_prompt_alternatives=num_prompt_alternatives,
            topk_sample_logprobs=topk_sample_logprobs,
            weight_updates=weight_updates,
        )
        return SampleStream(self._core, self._endpoint, request)

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

    def _request(
        self,
        prompt: ModelInput | Sequence[int],
        sampling_params: SamplingParams | None,
        num_samples: int,
        *,
        prompt_logprobs: bool,
        topk_prompt_logprobs: int,
        prompt_logprobs_last_n: int | None,
        target_prompt_tokens: ArrayLike | None,
        num_prompt_alternatives: int,
        topk_sample_logprobs: int,
        weight_updates: WeightUpdates,
    ) -> sampler_pb2.SampleRequest:
        params = sampling_params or SamplingParams()
        request = sampler_pb2.SampleRequest(
            sampling_session=self.name,
            prompt=_encode_prompt(prompt),
            num_samples=num_samples,
            params=codec.encode_sampling_params(params, seed=secrets.randbits(63)),
            prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            num_prompt_alternatives=num_prompt_alternatives,
            topk_sample_logprobs=topk_sample_logprobs,
            weight_updates=_WEIGHT_UPDATES[weight_updates],
            min_version=self._min_version(),
        )
        if target_prompt_tokens is not None:
            targets = np.asarray(target_prompt_tokens, dtype=np.int64)
            request.target_prompt_tokens.CopyFrom(tensors.encode_tensor(targets))
        return request

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
