"""Calls of one sampler; `sampler_forms.py` has all forms of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from tinsmith import tensors
from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import awaited, call
from tinsmith.rpc.futures import Ready, ResultFuture
from tinsmith.rpc.input_codec import encode_model_input
from tinsmith.sampling.sample_stream import SampleStream
from tinsmith.sampling.sampler_endpoint import SamplerEndpoint
from tinsmith.settings import Origin, RetryPolicy
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import ModelInput, SampleResponse, SamplingParams
from tinsmith.v1 import sampler_pb2, scheduler_pb2, trajectories_pb2

WeightUpdates = Literal["pinned", "in_flight"]

_WEIGHT_UPDATES: dict[str, sampler_pb2.WeightUpdates.ValueType] = {
    "pinned": sampler_pb2.WEIGHT_UPDATES_PINNED,
    "in_flight": sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT,
}


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt and what to draw for it; the fields are those of `Sampler.sample`."""

    prompt: ModelInput | Sequence[int]
    num_samples: int = 1
    sampling_params: SamplingParams | None = None
    include_prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: ArrayLike | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    weight_updates: WeightUpdates = "pinned"

    def encode(
        self, *, sampling_session: str, min_version: int, max_staleness: int = 0
    ) -> sampler_pb2.SampleRequest:
        """Return the message; a seed is drawn where none was given, so that it can be repeated.

        Returns:
            The message.

        Raises:
            KeyError: If `weight_updates` is no known word.
        """
        params = self.sampling_params or SamplingParams()
        message = sampler_pb2.SampleRequest(
            sampling_session=sampling_session,
            prompt=_encode_prompt(self.prompt),
            num_samples=self.num_samples,
            params=codec.encode_sampling_params(params, seed=secrets.randbits(63)),
            prompt_logprobs=self.include_prompt_logprobs,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
            num_prompt_alternatives=self.prompt_alt_tokens_k,
            topk_sample_logprobs=self.topk_sample_logprobs,
            weight_updates=_WEIGHT_UPDATES[self.weight_updates],
            min_version=min_version,
            max_staleness=max_staleness,
        )
        if self.target_prompt_logprobs is not None:
            targets = np.asarray(self.target_prompt_logprobs, dtype=np.int64)
            message.target_prompt_tokens.CopyFrom(tensors.encode_tensor(targets))
        return message


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSource:
    """The weights of a sampler: a base model, a checkpoint, or the live weights of a run."""

    origin: Origin
    base_model: str = ""
    checkpoint: str = ""
    run: str = ""
    min_version: int = 0
    """Version of the run that its samples are at least of."""
    max_staleness: int = 0


class SamplerCalls(Ready):
    """A handle to sample with; lives as long as its client.

    Example:
        >>> future = sampler.sample(prompt, 4, SamplingParams(max_tokens=64))
        >>> for sequence in future.result().sequences:
        ...     print(tokenizer.decode(sequence.tokens))
    """

    def __init__(
        self,
        core: ClientCore,
        message: scheduler_pb2.SamplingSession,
        endpoint: SamplerEndpoint,
        min_version: Callable[[], int] = lambda: 0,
        retry: RetryPolicy | None = None,
        max_staleness: int = 0,
    ) -> None:
        self._core = core
        self.max_staleness = max_staleness
        """Steps that the weights of a run may be older than `min_version`."""
        self._retry = retry or core.settings.retry
        self._endpoint = endpoint
        self._find_min_version = min_version
        self.name = message.name
        self.base_model = message.base_model
        self.chat_template = message.chat_template
        """Source of the template of its run; empty if it is that of the base model."""
        self.checkpoint = message.checkpoint
        self.run = message.run
        self.pool = message.pool
        """Whose workers it may use; empty is the shared pool."""
        self.on_answer: Callable[[], None] | None = None
        """Called in the client's own thread after each answer, and each episode that a server
        played with it: what waits for many of them sees that they come. It must not block."""

    def note_answer(self) -> None:
        """Say that something was sampled with it; see `on_answer`."""
        if self.on_answer is not None:
            self.on_answer()

    @property
    def source(self) -> SamplerSource:
        """What it samples from: what another process needs to open a sampler of the same."""
        return SamplerSource(
            origin=self._core.origin,
            base_model="" if self.checkpoint or self.run else self.base_model,
            checkpoint=self.checkpoint,
            run=self.run,
            min_version=self.min_version,
            max_staleness=self.max_staleness,
        )

    @property
    def min_version(self) -> int:
        """Version of a live run that a request of this moment sees at least; else 0."""
        return self._find_min_version()

    def __repr__(self) -> str:
        return f"Sampler({self.name!r}, base_model={self.base_model!r})"

    @awaited
    def sample(
        self,
        prompt: ModelInput | Sequence[int],
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: ArrayLike | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        weight_updates: WeightUpdates = "pinned",
    ) -> ResultFuture[SampleResponse]:
        """Draw completions of one prompt.

        A request that was cut off is sent again with the same seed, so it gives the same tokens.

        Args:
            prompt: What the model reads, T tokens.
            num_samples: Number of completions, each with a random stream of its own.
            sampling_params: How tokens are drawn.
            include_prompt_logprobs: Whether to score the prompt too.
            topk_prompt_logprobs: Number of most probable tokens to list at each prompt position.
            topk_sample_logprobs: Number of most probable tokens to list at each sampled token.
            target_prompt_logprobs: Tokens to score at each prompt position after the first,
                [T - 1, K]; -1 for none.
            prompt_alt_tokens_k: Number of tokens to draw at each prompt position after the first,
                at the temperature.
            prompt_logprobs_last_n: Score only this many tokens at the end of the prompt, 1 to
                T - 1.
            weight_updates: What happens to a completion of a live run when the run steps on:
                `pinned` draws all of it from one version, `in_flight` lets newer weights take
                effect between tokens.

        Returns:
            A future of the completions: tokens, their natural-log probabilities and versions.

        Raises:
            InvalidArgumentError: If a parameter is out of range or the prompt too long.
            NotFoundError: If the weights are gone.

        Example:
            >>> completions = sampler.sample(prompt, 4, SamplingParams(max_tokens=64)).result()
        """
        request = SampleRequest(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
            weight_updates,
        )
        message = request.encode(
            sampling_session=self.name,
            min_version=self.min_version,
            max_staleness=self.max_staleness,
        )
        return self._core.future(self._draw(message), what=f"sample from {self.name}")

    def stream(
        self,
        prompt: ModelInput | Sequence[int],
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: ArrayLike | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        weight_updates: WeightUpdates = "pinned",
    ) -> SampleStream:
        """Draw completions of one prompt and get their tokens as they are drawn.

        The arguments are those of `sample`, and so are the tokens for the same seed. A stream that
        broke off goes on by itself where it was; on a live run that stepped on in between, the rest
        is of the newer weights. Nothing is sent before the first chunk is asked for.

        Returns:
            A stream to loop over, with `for` or `async for`.

        Raises:
            InvalidArgumentError: From the loop, if a parameter is out of range.

        Example:
            >>> for chunk in sampler.stream(prompt):
            ...     print(chunk.tokens)
        """
        request = SampleRequest(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
            weight_updates,
        )
        message = request.encode(
            sampling_session=self.name,
            min_version=self.min_version,
            max_staleness=self.max_staleness,
        )
        return SampleStream(self._core, self._endpoint, message, self._retry)

    @awaited
    def compute_logprobs(
        self, prompt: ModelInput | Sequence[int]
    ) -> ResultFuture[list[float | None]]:
        """Score each token of a sequence given those before it.

        Returns:
            A future of T natural-log probabilities; None at position 0.

        Raises:
            InvalidArgumentError: If the sequence is too long.

        Example:
            >>> logprobs = sampler.compute_logprobs(tokens).result()
        """
        request = sampler_pb2.ComputeLogprobsRequest(
            sampling_session=self.name,
            input=_encode_prompt(prompt),
            min_version=self.min_version,
        )
        return self._core.future(self._score(request), what=f"score by {self.name}")

    @call
    async def _get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the base model, with the chat template of the run if it has one.

        Returns:
            The tokenizer.

        Raises:
            NotFoundError: If no worker serves the model any more.

        Example:
            >>> text = sampler.get_tokenizer().decode(sequence.tokens)
        """
        return await self._core.get_tokenizer(self.base_model, self.chat_template)

    def get_base_model(self) -> str:
        """Return the name of the base model.

        Returns:
            Its name, as `Client.list_models` has it.
        """
        return self.base_model

    async def _draw(self, request: sampler_pb2.SampleRequest) -> SampleResponse:
        with self._endpoint.of(request.prompt) as endpoint:
            response = await self._core.transport.call(
                endpoint,
                lambda c: c.sampler.Sample,
                request,
                timeout_s=self._core.settings.operation_timeout_s,
                retry=self._retry,
            )
        self.note_answer()
        return codec.decode_sample(response)

    async def _score(self, request: sampler_pb2.ComputeLogprobsRequest) -> list[float | None]:
        with self._endpoint.of(request.input) as endpoint:
            response = await self._core.transport.call(
                endpoint,
                lambda c: c.sampler.ComputeLogprobs,
                request,
                timeout_s=self._core.settings.operation_timeout_s,
                retry=self._retry,
            )
        return codec.decode_logprobs(response.logprobs)


def _encode_prompt(prompt: ModelInput | Sequence[int]) -> trajectories_pb2.ModelInput:
    value = prompt if isinstance(prompt, ModelInput) else ModelInput.from_ints(prompt)
    return encode_model_input(value)
