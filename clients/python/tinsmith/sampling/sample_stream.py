"""Completions that arrive token by token.

The reader pulls: a message is read from the network when the loop over the stream asks for it, so a
slow reader slows only itself. A stream that broke off is begun again with the same seed and
the number of tokens that arrived, and goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tinsmith.errors import TinsmithError, UnavailableError
from tinsmith.rpc import codec
from tinsmith.rpc.transport import Backoff, Endpoint, is_away
from tinsmith.sampling.resumed_stream import Messages, ResumedStream
from tinsmith.sampling.sampler_endpoint import SamplerEndpoint
from tinsmith.settings import RetryPolicy
from tinsmith.types import SampleChunk, SampledSequence, SampleResponse
from tinsmith.v1 import sampler_pb2

if TYPE_CHECKING:
    from tinsmith.rpc.core import ClientCore

_LOG = logging.getLogger(__name__)


class SampleStream:
    """The pieces of the completions of one prompt, as they are drawn.

    Loop over it with `for` or with `async for`, once. Use it as a context manager, or call `close`,
    where the loop may be left early: what is not read any more is then not sampled either.
    """

    def __init__(
        self,
        core: ClientCore,
        endpoint: SamplerEndpoint,
        request: sampler_pb2.SampleRequest,
        retry: RetryPolicy,
    ) -> None:
        self._background = core.background
        self._reader = _Reader(core, endpoint, request, retry)
        self._pieces = self._reader.pieces()
        self._is_closed = False

    @property
    def result(self) -> SampleResponse | None:
        """What has arrived so far, put together; None before the first piece.

        The stop reason of a sample that goes on is empty.
        """
        return self._reader.result()

    def __iter__(self) -> Iterator[SampleChunk]:
        return self

    def __next__(self) -> SampleChunk:
        piece = self._background.call(self._next())
        if piece is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> AsyncIterator[SampleChunk]:
        return self

    async def __anext__(self) -> SampleChunk:
        piece = await self._background.acall(self._next())
        if piece is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """Read no more; the server stops sampling. May be called twice."""
        self._background.call(self._close())

    async def close_async(self) -> None:
        """Do as `close`, in the caller's event loop."""
        await self._background.acall(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close_async()

    async def _next(self) -> SampleChunk | None:
        piece = await anext(self._pieces, None)
        if piece is None and not (self._is_closed or self._reader.is_complete):
            # An earlier wait for a piece was cancelled, which ended the stream but not its samples.
            self._pieces = self._reader.pieces()
            piece = await anext(self._pieces, None)
        return piece

    async def _close(self) -> None:
        self._is_closed = True
        await self._pieces.aclose()


class _Reader:
    """Reads a stream inside the background loop, and begins it again where it broke off."""

    def __init__(
        self,
        core: ClientCore,
        endpoint: SamplerEndpoint,
        request: sampler_pb2.SampleRequest,
        retry: RetryPolicy,
    ) -> None:
        self._core = core
        self._endpoint = endpoint
        self._retry = retry
        self._request = request
        self._prompt: SampleResponse | None = None
        self._samples = [
            SampledSequence(tokens=[], logprobs=[], versions=[], stop_reason="")
            for _ in range(max(request.num_samples, 1))
        ]
        self._stream = ResumedStream(
            len(self._samples), unavailable=functools.partial(UnavailableError, retry_after_s=0.0)
        )

    @property
    def is_complete(self) -> bool:
        """Whether all samples have ended."""
        return self._stream.is_complete

    def result(self) -> SampleResponse | None:
        """Return what has arrived, put together; None before the first message."""
        if self._prompt is None:
            return None
        prompt = self._prompt
        return SampleResponse(
            sequences=list(self._samples),
            seed=prompt.seed,
            prompt_logprobs=prompt.prompt_logprobs,
            topk_prompt_logprobs=prompt.topk_prompt_logprobs,
            target_prompt_logprobs=prompt.target_prompt_logprobs,
            prompt_alt_tokens=prompt.prompt_alt_tokens,
            prompt_cache_hit_tokens=prompt.prompt_cache_hit_tokens,
            version=max([prompt.version, *(v for one in self._samples for v in one.versions[-1:])]),
            sampler=prompt.sampler,
            sampler_choice=prompt.sampler_choice,
        )

    async def pieces(self) -> AsyncGenerator[SampleChunk, None]:
        """Yield what arrives, until all samples have ended."""
        with self._endpoint.of(self._request.prompt) as endpoint:
            async with contextlib.aclosing(self._pieces_from(endpoint)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _pieces_from(self, endpoint: Endpoint) -> AsyncGenerator[SampleChunk, None]:
        settings = self._core.settings
        backoff = Backoff(self._retry)

        def begin(received: Sequence[int]) -> Messages:
            return self._core.transport.stream_once(
                endpoint,
                lambda c: c.sampler.StreamSample,
                sampler_pb2.StreamSampleRequest(
                    sampling_session=self._request.sampling_session,
                    request=self._request,
                    received_tokens=received,
                ),
                timeout_s=settings.operation_timeout_s,
            )

        async def pause(error: Exception) -> None:
            if not isinstance(error, TinsmithError):
                raise error
            delay_s = backoff.delay_s(error, time.monotonic())
            if delay_s is None:
                raise backoff.gave_up(error, time.monotonic()) from error.__cause__
            _LOG.debug("stream is begun again", extra={"error": str(error)})
            await asyncio.sleep(delay_s)
            if is_away(error):
                await endpoint.relocate()

        async with contextlib.aclosing(self._stream.messages(begin, pause)) as messages:
            async for message in messages:
                backoff = Backoff(self._retry)
                yield self._take(message)

    def _take(self, message: sampler_pb2.StreamSampleResponse) -> SampleChunk:
        """Note what a message brings."""
        if message.HasField("prompt"):
            prompt = codec.decode_sample(message.prompt)
            # After a failure another sampler goes on; what it says of the prompt is known.
            self._prompt = dataclasses.replace(
                self._prompt or prompt,
                sampler=prompt.sampler,
                sampler_choice=prompt.sampler_choice,
            )
        index, known = message.sample_index, self._samples[message.sample_index]
        piece = codec.decode_piece(message)
        known.tokens.extend(piece.tokens)
        known.logprobs.extend(piece.logprobs)
        known.versions.extend(piece.versions)
        topk = known.topk_logprobs
        if piece.topk_logprobs is not None:
            topk = [*(topk or []), *piece.topk_logprobs]
        self._samples[index] = SampledSequence(
            known.tokens, known.logprobs, known.versions, piece.stop_reason, topk
        )
        return piece
