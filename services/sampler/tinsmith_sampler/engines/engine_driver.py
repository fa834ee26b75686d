"""Hands requests to an engine and brings completions back.

A request that its caller gave up is cancelled, so that a client that went away does not decode to
the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tinsmith_engine import SampledSequence, SampleRequest, Timeline, WeightVersion
from tinsmith_runtime.errors import InvalidFieldError, NonFiniteLossError
from tinsmith_runtime.usage import UsageAmounts
from tinsmith_sampler.engines.engine_protocol import SamplingEngine, Ticket
from tinsmith_sampler.metrics import KV_CACHE_BYTES, OPEN_STREAMS, WAITING_SEQUENCES
from tinsmith_sampler.requests.queue_limits import QueueLimits
from tinsmith_sampler.requests.sample_spans import begin_sample, end_sample
from tinsmith_sampler.requests.token_stream import Delivery, TokenFeed


@dataclass(slots=True)
class Load:
    """What has not ended.

    Attributes:
        num_requests: Of all callers.
        num_sequences: Of these, those that wait included.
        num_tokens: Of prompts and samples at most.
    """

    num_requests: int = 0
    num_sequences: int = 0
    num_tokens: int = 0

    def add(self, request: SampleRequest, times: int) -> None:
        """Count a request; `times` is 1, or -1 at its end."""
        self.num_requests += times
        self.num_sequences += times * request.num_samples
        length = len(request.prompt_tokens) + request.max_tokens
        self.num_tokens += times * request.num_samples * length


class SamplingDriver:
    """The requests of one base model."""

    def __init__(self, engine: SamplingEngine, base_model: str, limits: QueueLimits) -> None:
        self._engine = engine
        self._base_model = base_model
        self._limits = limits
        self.load = Load()
        KV_CACHE_BYTES.labels(base_model).set(engine.capabilities.cache_bytes)

    @property
    def engine(self) -> SamplingEngine:
        """What samples."""
        return self._engine

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt with its completion that the context and the cache hold."""
        return self._engine.capabilities.max_sequence_tokens

    async def begin(
        self,
        request: SampleRequest,
        feed: TokenFeed | None = None,
        *,
        charge: Callable[[UsageAmounts], None] = lambda _: None,
    ) -> Ticket:
        """Give a request to the engine; `close` must follow.

        Args:
            request: What is asked for.
            feed: Gets the tokens as they are drawn.
            charge: Is told what the request used, on any thread.

        Raises:
            QueueFullError: If too many sequences of the project, or of all, wait.
            VersionNotLoadedError: If the weights were replaced before the request began.
        """
        self._limits.enter(request.cache_scope, request.num_samples)
        span = begin_sample(request, self._base_model)
        if span is not None:
            request = dataclasses.replace(request, timeline=Timeline())
        ticket = Ticket(
            request,
            feed,
            charge=charge,
            span=span,
            begin_s=0.0 if span is None else time.time(),
        )
        WAITING_SEQUENCES.inc(request.num_samples)
        self.load.add(request, 1)
        if feed is not None:
            OPEN_STREAMS.inc()
        try:
            await self._engine.submit(ticket)
        except BaseException:
            self.close(ticket)
            raise
        return ticket

    async def wait(self, ticket: Ticket) -> list[SampledSequence]:
        """Return the completions of a request, in the order of their ends.

        Raises:
            NonFiniteLossError: If the weights give no finite distribution.
        """
        sequences = await asyncio.wrap_future(ticket.future)
        _check_ends(sequence.finish_reason for sequence in sequences)
        return sequences

    async def take(self, ticket: Ticket) -> Delivery | None:
        """Return what was drawn since the last time; None at the end.

        Raises:
            NonFiniteLossError: If the weights give no finite distribution.
        """
        if ticket.feed is None:
            raise TypeError("the request was begun without a feed")
        delivery = await ticket.feed.take()
        if delivery is not None:
            _check_ends(piece.reason for piece in delivery.pieces)
        return delivery

    async def update(self, ticket: Ticket, weights: WeightVersion) -> None:
        """Sample the tokens to come from newer weights.

        Raises:
            VersionNotLoadedError: If they were replaced by even newer ones.
        """
        await self._engine.update(ticket, weights)

    def close(self, ticket: Ticket) -> None:
        """End a request; what it did not sample yet is not sampled. May be called twice."""
        if ticket.is_closed:
            return
        ticket.is_closed = True
        self._limits.leave(ticket.request.cache_scope, ticket.request.num_samples)
        WAITING_SEQUENCES.dec(ticket.request.num_samples)
        self.load.add(ticket.request, -1)
        if ticket.feed is not None:
            OPEN_STREAMS.dec()
        if ticket.span is not None:
            is_over = ticket.future.done() and not ticket.future.cancelled()
            end_sample(
                ticket.span,
                ticket.request,
                ticket.finished,
                begin_s=ticket.begin_s,
                problem="" if is_over else "given up",
            )
        if ticket.future.done() and not ticket.future.cancelled():
            return
        self._engine.cancel(ticket)


def _check_ends(reasons: Iterable[str | None]) -> None:
    found = set(reasons)
    if "constraint" in found:
        raise InvalidFieldError(
            "params.output_format", "takes too much work to follow for a sample; make it simpler"
        )
    if "error" in found:
        raise NonFiniteLossError(
            "the weights give no finite distribution over tokens; sample from an earlier checkpoint"
        )
