"""Sampling as the domain sees it: a session, a prompt, completions."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith_engine import Published, SampledSequence, SampleRequest
from tinsmith_engine.host import EngineHost
from tinsmith_engine.images import place_images
from tinsmith_engine.sampling import rows_within
from tinsmith_engine.values import ImageInput
from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import (
    ErrorCode,
    InvalidFieldError,
    ResourceExhaustedError,
    SequenceTooLongError,
    TinsmithError,
    TokenOutOfVocabularyError,
    VersionNotLoadedError,
)
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.driver import SamplingDriver
from tinsmith_sampler.sessions import SessionCache, Target
from tinsmith_sampler.weights import WeightSource

_MAX_PUBLISH_RACES = 8
_ROWS_WITHOUT_CACHE = 16
_ELSEWHERE_CODES = frozenset(
    {ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED}
)

DecodeText = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A request before it is tied to weights; the fields are those of `SampleRequest`."""

    session: str
    tokens: Sequence[int]
    tokens_field: str = "prompt"
    """Where the tokens stood in the request, for errors."""
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: Sequence[int] | None = None
    stop_strings: Sequence[str] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    min_version: int = 0
    images: Sequence[ImageInput] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """Completions of a prompt.

    Attributes:
        sequences: In the order of their random streams.
        seed: What they were drawn with.
        version: Of the weights; 0 for a base model.
    """

    sequences: list[SampledSequence]
    seed: int
    version: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights in memory: where they come from, their version, requests that sample from them."""

    source: str
    version: int
    num_requests: int


class SamplingService:
    """Samples for sessions.

    Args:
        config: Limits.
        host: The engines.
        sessions: What each session samples from.
        weights: Where weights come from.
        decoders: By base model, turns tokens into text; needed for stop strings.
        stop_tokens: By base model, what ends a turn.
    """

    def __init__(
        self,
        config: SamplerConfig,
        host: EngineHost,
        sessions: SessionCache,
        weights: WeightSource,
        decoders: Mapping[str, DecodeText],
        stop_tokens: Mapping[str, Sequence[int]],
    ) -> None:
        self._config = config
        self._host = host
        self._sessions = sessions
        self._weights = weights
        self._decoders = decoders
        self._stop_tokens = stop_tokens
        self._drivers = {
            name: SamplingDriver(
                host,
                name,
                max_rows=min(
                    config.max_concurrent_sequences,
                    rows_within(engine, config.cache_bytes) or _ROWS_WITHOUT_CACHE,
                ),
                max_waiting=config.max_queued_sequences,
            )
            for name, engine in host.engines.items()
        }

    async def sample(self, prompt: Prompt) -> Sampled:
        """Draw completions; see `SamplerService.Sample` for the errors."""
        target = await self._sessions.get(prompt.session)
        seed = secrets.randbits(63) if prompt.seed is None else prompt.seed
        if prompt.images:
            prompt = await asyncio.to_thread(self._place, prompt, target)
        self._check(prompt, target)
        for attempt in range(_MAX_PUBLISH_RACES):
            published = await self._resolve(prompt, target)
            request = self._request(prompt, target, published, seed)
            try:
                failpoints.passing("sampler.sample")
                sequences = await self._drivers[target.base_model].run(request)
                failpoints.passing("sampler.sampled")
            except VersionNotLoadedError:
                # The run stepped on between the look-up and the start of the request.
                if attempt + 1 == _MAX_PUBLISH_RACES:
                    raise
            else:
                return Sampled(sequences, seed, published.version if published else 0)
        raise AssertionError("the loop returns or raises")

    def loaded(self, project: str) -> list[Loaded]:
        """Return the versions of a project that are in memory, oldest first."""
        sources = self._weights.loaded()
        found = []
        for engine in self._host.engines.values():
            for published in engine.versions.held():
                source = sources.get(published.run, published.run)
                if source.startswith(f"{project}/"):
                    # One holder is whoever published it; the others are requests.
                    num_requests = engine.versions.num_holders(published) - 1
                    found.append(Loaded(source, published.version, num_requests))
        return found

    async def _resolve(self, prompt: Prompt, target: Target) -> Published | None:
        try:
            return await self._weights.get(target, min_version=prompt.min_version)
        except TinsmithError as error:
            if error.code in _ELSEWHERE_CODES:
                # The run may have moved, or the session ended: ask the scheduler next time.
                self._sessions.forget(prompt.session)
            raise

    def _place(self, prompt: Prompt, target: Target) -> Prompt:
        """Open the images of a prompt and put their placeholders among its tokens."""
        info = self._host.engine(target.base_model).info
        tokens_T = np.asarray(prompt.tokens, dtype=np.int64)
        tokens_T, images = place_images(tokens_T, prompt.images, info, prompt.tokens_field)
        return dataclasses.replace(prompt, tokens=tokens_T.tolist(), images=images)

    def _check(self, prompt: Prompt, target: Target) -> None:
        limits = self._host.engine(target.base_model).info
        if not 1 <= prompt.num_samples <= self._config.max_samples:
            raise ResourceExhaustedError(
                f"num_samples is {prompt.num_samples}, 1 to {self._config.max_samples} are "
                "allowed; send several requests",
                limit=self._config.max_samples,
            )
        if prompt.topk_prompt_logprobs > self._config.max_topk_logprobs:
            raise InvalidFieldError(
                "topk_prompt_logprobs", f"must be 0 to {self._config.max_topk_logprobs}"
            )
        wants_tokens = prompt.max_tokens is None or prompt.max_tokens > 0
        if len(prompt.tokens) + wants_tokens > limits.max_context_tokens:
            raise SequenceTooLongError(
                f"the prompt has {len(prompt.tokens)} tokens and leaves no room in the context of "
                f"{limits.max_context_tokens}; shorten it",
                limit=limits.max_context_tokens,
            )
        for position, token in enumerate(prompt.tokens):
            if not 0 <= token < limits.vocab_size:
                raise TokenOutOfVocabularyError(
                    prompt.tokens_field,
                    f"holds token {token} at position {position}, the vocabulary has "
                    f"{limits.vocab_size}",
                    token=token,
                    vocab_size=limits.vocab_size,
                )

    def _request(
        self, prompt: Prompt, target: Target, published: Published | None, seed: int
    ) -> SampleRequest:
        room = self._host.engine(target.base_model).info.max_context_tokens - len(prompt.tokens)
        stop_tokens = prompt.stop_tokens
        if stop_tokens is None:
            stop_tokens = self._stop_tokens.get(target.base_model, ())
        return SampleRequest(
            prompt_tokens=prompt.tokens,
            max_tokens=max(room, 0) if prompt.max_tokens is None else prompt.max_tokens,
            weights=published,
            num_samples=prompt.num_samples,
            temperature=prompt.temperature,
            top_k=prompt.top_k,
            top_p=prompt.top_p,
            seed=seed,
            stop_tokens=stop_tokens,
            stop_strings=prompt.stop_strings,
            decode_text=self._decoders.get(target.base_model),
            prompt_logprobs=prompt.prompt_logprobs,
            topk_prompt_logprobs=prompt.topk_prompt_logprobs,
            images=prompt.images,
        )
