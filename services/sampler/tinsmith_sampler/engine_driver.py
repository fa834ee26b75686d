"""Hands requests to the engine's sampler and brings completions back.

The sampler lives on the engine's thread and steps there between other jobs. A request that its
caller gave up is cancelled, so that a client that went away does not decode to the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from tinsmith_engine import Published, SampledSequence, Sampler, SampleRequest
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import (
    DrainingError,
    InternalError,
    NonFiniteLossError,
    internal_error,
)
from tinsmith_sampler.metrics import (
    CACHED_PROMPT_TOKENS,
    KV_CACHE_BYTES,
    OPEN_STREAMS,
    PROMPT_TOKENS,
    SAMPLED_TOKENS,
    SEQUENCES,
    WAITING_SEQUENCES,
    WEIGHT_UPDATES,
)
from tinsmith_sampler.queue_limits import QueueLimits
from tinsmith_sampler.token_stream import Delivery, TokenFeed

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that was given to the engine, and what of it is finished."""

    request: SampleRequest
    feed: TokenFeed | None
    future: Future[list[SampledSequence]] = field(default_factory=Future)
    request_id: int | None = None
    """Set on the engine's thread."""
    finished: list[SampledSequence] = field(default_factory=list)
    """In the order of their ends."""
    is_closed: bool = False


class SamplingDriver:
    """The sampler of one base model.

    Args:
        host: Owns the engine and its thread.
        base_model: Name of the model.
        max_sequences: Sequences that decode at once.
        cache_bytes: Memory of their keys and values.
        limits: Bounds of what may be unfinished.
        note_outdated: Is told, on the engine's thread, of a run that has newer weights than a
            request that follows it.
    """

    def __init__(
        self,
        host: EngineHost,
        base_model: str,
        *,
        max_sequences: int,
        cache_bytes: int,
        limits: QueueLimits,
        note_outdated: Callable[[str], None],
    ) -> None:
        self._host = host
        self._sampler = Sampler(
            host.engine(base_model), max_sequences=max_sequences, cache_bytes=cache_bytes
        )
        KV_CACHE_BYTES.labels(base_model).set(self._sampler.cache_bytes)
        self._limits = limits
        self._tickets: dict[int, Ticket] = {}
        self._feeds: dict[int, TokenFeed] = {}
        self._note_outdated = note_outdated
        self._outdated: set[Published] = set()
        host.thread.add_stepper(self._step, self._fail_all)

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt with its completion that the context and the cache hold."""
        return self._sampler.max_sequence_tokens

    async def begin(self, request: SampleRequest, feed: TokenFeed | None = None) -> Ticket:
        """Give a request to the engine; `close` must follow.

        Args:
            request: What is asked for.
            feed: Gets the tokens as they are drawn.

        Raises:
            QueueFullError: If too many sequences of the project, or of all, wait.
            VersionNotLoadedError: If the weights were replaced before the request began.
        """
        self._limits.enter(request.cache_scope, request.num_samples)
        ticket = Ticket(request, feed)
        WAITING_SEQUENCES.inc(request.num_samples)
        if feed is not None:
            OPEN_STREAMS.inc()
        try:
            await self._host.call(self._add, ticket)
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
        _check_finite(sequence.finish_reason for sequence in sequences)
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
            _check_finite(piece.reason for piece in delivery.pieces)
        return delivery

    async def update(self, ticket: Ticket, weights: Published) -> None:
        """Sample the tokens to come from newer weights.

        Raises:
            VersionNotLoadedError: If they were replaced by even newer ones.
        """
        await self._host.call(self._update, ticket, weights)

    def close(self, ticket: Ticket) -> None:
        """End a request; what it did not sample yet is not sampled. May be called twice."""
        if ticket.is_closed:
            return
        ticket.is_closed = True
        self._limits.leave(ticket.request.cache_scope, ticket.request.num_samples)
        WAITING_SEQUENCES.dec(ticket.request.num_samples)
        if ticket.feed is not None:
            OPEN_STREAMS.dec()
        if ticket.future.done() and not ticket.future.cancelled():
            return
        try:
            # Behind `_add`, which may be running although its caller no longer waits for it.
            self._host.thread.submit(self._cancel, ticket)
        except DrainingError:
            logger.debug("the engine stopped before a request was cancelled")

    # On the engine's thread from here on.

    def _add(self, ticket: Ticket) -> None:
        ticket.request_id = self._sampler.add(ticket.request, ticket.feed)
        self._tickets[ticket.request_id] = ticket
        if ticket.feed is not None:
            self._feeds[ticket.request_id] = ticket.feed
        PROMPT_TOKENS.inc(len(ticket.request.prompt_tokens))

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.request_id is not None:
            self._sampler.cancel(ticket.request_id)
            self._tickets.pop(ticket.request_id, None)
            self._feeds.pop(ticket.request_id, None)

    def _update(self, ticket: Ticket, weights: Published) -> None:
        if ticket.request_id is not None and self._sampler.update(ticket.request_id, weights):
            WEIGHT_UPDATES.inc()

    def _step(self) -> bool:
        finished = self._sampler.step()
        for feed in self._feeds.values():
            feed.flush()
        for sequence in finished:
            SAMPLED_TOKENS.inc(len(sequence.tokens))
            SEQUENCES.labels(sequence.finish_reason).inc()
            ticket = self._tickets[sequence.request_id]
            ticket.finished.append(sequence)
            if len(ticket.finished) == ticket.request.num_samples:
                del self._tickets[sequence.request_id]
                self._feeds.pop(sequence.request_id, None)
                CACHED_PROMPT_TOKENS.inc(sequence.num_cached_prompt_tokens)
                if ticket.future.set_running_or_notify_cancel():
                    ticket.future.set_result(ticket.finished)
        self._announce()
        return self._sampler.has_work

    def _announce(self) -> None:
        """Tell of each version once that its run has newer weights."""
        outdated = self._sampler.outdated()
        for published in outdated - self._outdated:
            self._note_outdated(published.run)
        self._outdated = outdated

    def _fail_all(self, error: Exception) -> None:
        """End everything that decodes: a step failed, and its state cannot be trusted."""
        reported: InternalError = internal_error()
        logger.error(
            "decoding failed",
            extra={"num_requests": len(self._tickets), "problem": type(error).__name__},
        )
        for request_id, ticket in list(self._tickets.items()):
            self._sampler.cancel(request_id)
            if ticket.feed is not None:
                ticket.feed.fail(reported)
            if ticket.future.set_running_or_notify_cancel():
                ticket.future.set_exception(reported)
        self._tickets.clear()
        self._feeds.clear()
        self._sampler.forget_prompts()


def _check_finite(reasons: Iterable[str | None]) -> None:
    if "error" in reasons:
        raise NonFiniteLossError(
            "the weights give no finite distribution over tokens; sample from an earlier checkpoint"
        )
