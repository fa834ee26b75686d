"""Sampling as the domain sees it: a session, a prompt, completions."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tinsmith_engine import (
    SampledSequence,
    SampleRequest,
    WeightVersion,
    validate_sample_request,
)
from tinsmith_engine.base.types import ModelInfo
from tinsmith_engine.host import model_not_served
from tinsmith_engine.sampling.request.sample_request import DecodeText, place_prompt
from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import (
    ErrorCode,
    InvalidFieldError,
    ResourceExhaustedError,
    SequenceTooLongError,
    TinsmithError,
    VersionNotLoadedError,
)
from tinsmith_runtime.usage import Quantity
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engines.engine_driver import Load, SamplingDriver
from tinsmith_sampler.engines.engine_protocol import EngineCapabilities, SamplingEngine, Ticket
from tinsmith_sampler.metrics import FIRST_TOKEN_SECONDS, OUTPUT_TOKEN_SECONDS, WEIGHTS_SECONDS
from tinsmith_sampler.requests.queue_limits import QueueLimits
from tinsmith_sampler.requests.sampled_metrics import RUN_SAMPLING, run_of
from tinsmith_sampler.requests.sessions import SessionCache, Target
from tinsmith_sampler.requests.token_stream import Delivery, TokenFeed
from tinsmith_sampler.requests.usage_log import SampledUsage
from tinsmith_sampler.weights.live_weights import WeightFollower
from tinsmith_sampler.weights.weight_source import WeightSource

_MAX_EXPORT_RACES = 8
_SCORING = frozenset({Quantity.PREFILLED_TOKENS, Quantity.ENGINE_SECONDS})
_ELSEWHERE_CODES = frozenset(
    {ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A request of a session, before it is tied to weights."""

    session: str
    request: SampleRequest
    tokens_field: str = "prompt"
    """Where the tokens stood in the request, for errors."""
    uses_model_stop_tokens: bool = True
    """Whether the tokens that end a turn of the model end a completion."""
    min_version: int = 0
    max_staleness: int = 0
    key_id: str = ""
    """What it is charged to; empty if that is not known."""

    @property
    def uses(self) -> frozenset[Quantity]:
        """What of budgets it uses up."""
        if self.request.max_tokens <= 0:
            return _SCORING
        return _SCORING | {Quantity.SAMPLED_TOKENS}


@dataclass(frozen=True, slots=True)
class Sampled:
    """Completions of a prompt.

    Attributes:
        sequences: In the order of their random streams.
        seed: What they were drawn with.
        version: Of the newest weights that were used; 0 for a base model.
    """

    sequences: list[SampledSequence]
    seed: int
    version: int


class SampleStream:
    """Completions of a prompt, as they are drawn.

    Args:
        seed: What they are drawn with.
        take: Returns the next delivery, or None at the end.
        close: Ends the request.
    """

    def __init__(
        self,
        seed: int,
        take: Callable[[], Awaitable[Delivery | None]],
        close: Callable[[], None],
    ) -> None:
        self.seed = seed
        self._take = take
        self._close = close

    def close(self) -> None:
        """Sample no more, and let go of the weights. May be called twice."""
        self._close()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while (delivery := await self._take()) is not None:
            yield delivery


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
        engines: By base model.
        sessions: What each session samples from.
        weights: Where weights come from.
        follower: Brings newer ones to requests that take them.
        decoders: By base model, turns tokens into text; needed for stop strings.
        stop_tokens: By base model, what ends a turn.
        usage: Counts what requests use.
    """

    def __init__(
        self,
        config: SamplerConfig,
        engines: Mapping[str, SamplingEngine],
        sessions: SessionCache,
        weights: WeightSource,
        follower: WeightFollower,
        decoders: Mapping[str, DecodeText],
        stop_tokens: Mapping[str, Sequence[int]],
        usage: SampledUsage,
    ) -> None:
        self._usage = usage
        self._config = config
        self._sessions = sessions
        self._weights = weights
        self._decoders = decoders
        self._stop_tokens = stop_tokens
        self._follower = follower
        self._drivers = {
            name: SamplingDriver(
                engine,
                name,
                QueueLimits(config.max_queued_sequences, config.max_project_queued_sequences),
            )
            for name, engine in engines.items()
        }

    @property
    def capabilities(self) -> EngineCapabilities | None:
        """What samples, the same for all models of a pod; None if it has no model."""
        return next((driver.engine.capabilities for driver in self._drivers.values()), None)

    @property
    def load(self) -> Load:
        """What all models of the pod have to do together."""
        loads = [driver.load for driver in self._drivers.values()]
        return Load(
            num_requests=sum(load.num_requests for load in loads),
            num_sequences=sum(load.num_sequences for load in loads),
            num_tokens=sum(load.num_tokens for load in loads),
        )

    async def sample(self, prompt: Prompt) -> Sampled:
        """Draw completions; see `SamplerService.Sample` for the errors."""
        started = await self._start(prompt)
        try:
            ended = await started.driver.wait(started.ticket)
            failpoints.passing("sampler.sampled")
        finally:
            started.close()
        version = 0 if started.handle is None else started.handle.version
        if ended[-1].versions:
            version = ended[-1].versions[-1]
        sequences = sorted(ended, key=lambda sequence: sequence.sample_index)
        return Sampled(sequences, started.seed, version)

    async def stream(self, prompt: Prompt, received: Sequence[int]) -> SampleStream:
        """Draw completions and give them away as they are drawn; `close` must follow.

        Args:
            prompt: What is sampled.
            received: How many tokens of each sample the caller has; they are left out. Empty for
                none.

        Raises:
            InvalidFieldError: If `received` is neither empty nor a count for each sample.
            TinsmithError: See `SamplerService.Sample`.
        """
        if received and len(received) != prompt.request.num_samples:
            raise InvalidFieldError(
                "received_tokens",
                f"must be empty or hold a count for each of {prompt.request.num_samples} samples, "
                f"got {len(received)}",
            )
        started = await self._start(prompt, received)
        return SampleStream(started.seed, started.take, started.close)

    async def _start(self, prompt: Prompt, received: Sequence[int] | None = None) -> _Started:
        """Give a request to the engine; with `received`, its tokens go to a feed."""
        target = await self._sessions.get(prompt.session)
        self._usage.budgets.require(target.project, prompt.uses)
        driver = self._driver(target.base_model)
        info = driver.engine.info
        request = prompt.request
        if request.images:
            request = await asyncio.to_thread(place_prompt, request, info, prompt.tokens_field)
        self._check_limits(request, info)
        request = self._tied(prompt, request, target)
        validate_sample_request(request, info, prompt_field=prompt.tokens_field)
        driver.engine.refuse(request)
        charge = functools.partial(
            self._usage.charge, target.project, run_of(target), prompt.key_id
        )
        for attempt in range(_MAX_EXPORT_RACES):
            handle = await self._resolve(prompt, target)
            feed = None if received is None else TokenFeed(request.num_samples, received)
            failpoints.passing("sampler.sample")
            try:
                tied = dataclasses.replace(request, weights=handle)
                ticket = await driver.begin(tied, feed, charge=charge)
            except VersionNotLoadedError:
                # The run stepped on between the look-up and the start of the request.
                if attempt + 1 == _MAX_EXPORT_RACES:
                    raise
            else:
                started = _Started(driver, ticket, request.seed, handle, target)
                if request.follows_run:
                    started.stop_following = self._follower.follow(
                        target, functools.partial(driver.update, ticket)
                    )
                return started
        raise AssertionError("the loop returns or raises")

    def loaded(self, project: str) -> list[Loaded]:
        """Return the versions of a project that are in memory, oldest first."""
        sources = self._weights.loaded()
        found = []
        for driver in self._drivers.values():
            for held in driver.engine.held():
                source = sources.get(held.handle.run, held.handle.run)
                if source.startswith(f"{project}/"):
                    found.append(Loaded(source, held.handle.version, held.num_requests))
        return found

    def _driver(self, base_model: str) -> SamplingDriver:
        driver = self._drivers.get(base_model)
        if driver is None:
            raise model_not_served(base_model, self._drivers)
        return driver

    async def _resolve(self, prompt: Prompt, target: Target) -> WeightVersion | None:
        source = "run" if target.run else "checkpoint" if target.checkpoint else "base"
        try:
            with WEIGHTS_SECONDS.labels(source).time():
                handle = await self._weights.get(
                    target, min_version=prompt.min_version, max_staleness=prompt.max_staleness
                )
        except TinsmithError as error:
            if error.code in _ELSEWHERE_CODES:
                # The run may have moved, or the session ended: ask the scheduler next time.
                self._sessions.forget(prompt.session)
            raise
        if handle is not None:
            RUN_SAMPLING.note_version(target, handle.version)
        return handle

    def _check_limits(self, request: SampleRequest, info: ModelInfo) -> None:
        """Refuse what this pod, or the context of the model, has no room for."""
        if not 1 <= request.num_samples <= self._config.max_samples:
            raise ResourceExhaustedError(
                f"num_samples is {request.num_samples}, 1 to {self._config.max_samples} are "
                "allowed; send several requests",
                limit=self._config.max_samples,
            )
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "num_prompt_alternatives"):
            if getattr(request, name) > self._config.max_topk_logprobs:
                raise InvalidFieldError(name, f"must be 0 to {self._config.max_topk_logprobs}")
        if len(request.prompt_tokens) + (request.max_tokens > 0) > info.max_context_tokens:
            raise SequenceTooLongError(
                f"the prompt has {len(request.prompt_tokens)} tokens and leaves no room in the "
                f"context of {info.max_context_tokens}; shorten it",
                limit=info.max_context_tokens,
            )

    def _tied(self, prompt: Prompt, request: SampleRequest, target: Target) -> SampleRequest:
        """Return a request with what the session and its model say."""
        driver = self._driver(target.base_model)
        # What does not fit is cut: a limit is no promise of a length. A prompt that leaves room for
        # no token is refused by the engine.
        room = driver.max_sequence_tokens - len(request.prompt_tokens)
        max_tokens = min(request.max_tokens, max(room, 1))
        ends = dict.fromkeys(request.stop_tokens)
        if prompt.uses_model_stop_tokens:
            own = [*self._stop_tokens.get(target.base_model, ()), *target.stop_tokens]
            ends |= dict.fromkeys(own)
        # A token outside the vocabulary is never drawn, and engines cannot mask it in `min_tokens`.
        vocabulary = range(driver.engine.info.vocab_size)
        return dataclasses.replace(
            request,
            max_tokens=max_tokens,
            min_tokens=min(request.min_tokens, max_tokens),
            stop_tokens=[token for token in ends if token in vocabulary],
            decode_text=self._decoders.get(target.base_model),
            # A base model and a checkpoint do not change.
            follows_run=request.follows_run and bool(target.run),
            cache_scope=target.project,
        )


@dataclass(slots=True)
class _Started:
    """A request on the engine."""

    driver: SamplingDriver
    ticket: Ticket
    seed: int
    handle: WeightVersion | None
    target: Target
    stop_following: Callable[[], None] | None = None
    begin_s: float = field(default_factory=time.perf_counter)
    has_first_token: bool = False

    async def take(self) -> Delivery | None:
        """Return what was drawn since the last time; None at the end."""
        delivery = await self.driver.take(self.ticket)
        if delivery is not None and not self.has_first_token:
            self.has_first_token = any(piece.tokens for piece in delivery.pieces)
            if self.has_first_token:
                FIRST_TOKEN_SECONDS.observe(time.perf_counter() - self.begin_s)
        return delivery

    def close(self) -> None:
        """End it; may be called twice."""
        if self.stop_following is not None:
            self.stop_following()
        if not self.ticket.is_closed:
            self._measure()
        self.driver.close(self.ticket)

    def _measure(self) -> None:
        sequences = list(self.ticket.finished)
        RUN_SAMPLING.note_end(self.target, sequences)
        longest = max((len(one.tokens) for one in sequences), default=0)
        if longest:
            OUTPUT_TOKEN_SECONDS.observe((time.perf_counter() - self.begin_s) / longest)
