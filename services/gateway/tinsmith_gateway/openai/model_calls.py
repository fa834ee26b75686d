"""Model calls: what is sampled from, kept alive, sampled, and recorded.

Under the key of an episode nothing is chosen by the request: the sampling session is the episode's,
the lease is renewed while a call runs, and the exact tokens are recorded before the answer ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from tinsmith.backoff import backoff
from tinsmith.sampling.resumed_stream import ResumedStream
from tinsmith.v1 import episode_pb2, sampler_pb2, scheduler_pb2
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.openai import codec
from tinsmith_gateway.openai.codec import Sampled
from tinsmith_gateway.openai.rendering import Prompt
from tinsmith_gateway.openai.sampling_handles import Handle, SamplingHandles
from tinsmith_gateway.openai.text.model_names import Checkpoint, SavedPath, Source, candidates
from tinsmith_gateway.openai.tokenizers import TokenizerStore
from tinsmith_gateway.services import Services
from tinsmith_gateway.tinker.wire.contract_calls import Native
from tinsmith_gateway.tokenizing.confined_tokenizer import ConfinedTokenizer
from tinsmith_gateway.tokenizing.model_tokenizer import ChatTokenizer
from tinsmith_gateway.upstream.routing import EPISODE_SERVICE, SAMPLER_SERVICE, SCHEDULER_SERVICE
from tinsmith_runtime.errors import (
    ErrorCode,
    ModelNotFoundError,
    TinsmithError,
    WorkerUnavailableError,
)

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# OpenAI's clients give up by themselves after this time.
_SAMPLE_TIMEOUT_S = 600.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
_MIN_RENEWAL_S, _MAX_RENEWAL_S = 0.2, 15.0
_RENEWALS_PER_LEASE = 4
_SESSION_GONE = "SAMPLING_SESSION_NOT_FOUND"
_LEASE_GONE = frozenset({"LEASE_LOST", "EPISODE_ENDED", "KEY_INVALID", "EPISODE_NOT_FOUND"})
_MAX_EPISODE_HANDLES = 10_000


@dataclass(frozen=True, slots=True)
class Target:
    """What a call samples from, alive while it is held.

    Attributes:
        credential: Whose call it is.
        handle: The sampling session.
        tokenizer: Of its base model.
        sources: What the name in the request stands for; empty under the key of an episode.
        lease: Fails once the lease of the episode is lost; None for a user.
    """

    credential: Credential
    handle: Handle
    tokenizer: ChatTokenizer
    sources: tuple[Source, ...]
    lease: asyncio.Future[None] | None = None

    def check_lease(self) -> None:
        """Raise what the lease was lost by, if it was."""
        if self.lease is not None and self.lease.done():
            self.lease.result()


@dataclass(frozen=True, slots=True)
class Answered:
    """The samples of one prompt.

    Attributes:
        samples: In the order of their random streams.
        about_prompt: The answer of the sampler, for what it says of the prompt.
    """

    samples: list[Sampled]
    about_prompt: sampler_pb2.SampleResponse


@dataclass(frozen=True, slots=True)
class StreamedPiece:
    """A piece of one sample; `about_prompt` is set in the first alone."""

    index: int
    sampled: Sampled
    about_prompt: sampler_pb2.SampleResponse | None = None


class ModelCalls:
    """Samples for OpenAI clients."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._upstream = services.upstream
        self._aliases = services.config.aliases()
        self._handles = SamplingHandles(services.upstream)
        self._tokenizers = TokenizerStore(
            services.upstream,
            services.confined,
            max_bytes=services.config.max_tokenizer_bytes,
        )
        self._episode_handles: dict[str, Handle] = {}

    async def aside(
        self, target: Target, work: Callable[..., ResultT], *args: Any, num_text: int = 0
    ) -> ResultT:
        """Return what work with the target's tokenizer returns, aside from other requests.

        Args:
            target: Whose tokenizer it uses.
            work: What is done with it.
            args: Of the work.
            num_text: Characters of text that it encodes; large texts wait for their turn.
        """
        if isinstance(target.tokenizer, ConfinedTokenizer):
            # It has a process of its own, with a bound of memory and one text at a time.
            return await target.tokenizer.aside(work, *args)
        return await self._services.threads.run_texts(
            target.credential.caller.project, num_text, work, *args
        )

    @contextlib.asynccontextmanager
    async def target(self, credential: Credential, model: str) -> AsyncIterator[Target]:
        """Hold what a request samples from.

        Args:
            credential: Whose request it is.
            model: As the request names it.

        Raises:
            ModelNotFoundError: If the name stands for nothing that the caller may use.
        """
        if credential.episode is not None:
            async with self._episode_target(credential, credential.episode, model) as target:
                yield target
            return
        sources = await self.sources(credential, model)
        async with self._handles.use(credential, sources) as handle:
            tokenizer = await self._tokenizers.get(
                handle.base_model, credential, handle.chat_template
            )
            yield Target(credential, handle, tokenizer, sources)

    async def sources(self, credential: Credential, model: str) -> tuple[Source, ...]:
        """Return what a name may stand for.

        Raises:
            ModelNotFoundError: If it has no form that anything has.
            CheckpointNotFoundError: If it is a path of the Tinker wire that leads nowhere.
        """
        project = credential.caller.project
        found = candidates(model, project=project, aliases=self._aliases)
        if not found:
            raise ModelNotFoundError(
                f"{model!r} names no model; GET /v1/models lists what there is", model=model
            )
        native = Native(self._services, credential)
        return tuple(
            [
                # A name may be saved again, so what it means is asked each time.
                Checkpoint((await native.checkpoint(source.path)).name)
                if isinstance(source, SavedPath)
                else source
                for source in found
            ]
        )

    async def sample(self, target: Target, request: sampler_pb2.SampleRequest) -> Answered:
        """Draw completions, all at once."""
        work = self._sample(target, request)
        message = await (work if target.lease is None else _while_held(target.lease, work))
        samples = [codec.decode_sequence(sequence) for sequence in message.sequences]
        return Answered(samples, message)

    async def stream(
        self, target: Target, request: sampler_pb2.SampleRequest
    ) -> AsyncGenerator[StreamedPiece]:
        """Draw completions, and yield their pieces as they come.

        A stream that breaks off is taken up where it was, since a seed repeats its tokens. The
        weights of a live run may have changed meanwhile: its stream is begun again only if nothing
        of it has left.
        """
        stream = ResumedStream(request.num_samples, unavailable=WorkerUnavailableError)
        deadline_s = time.monotonic() + _SAMPLE_TIMEOUT_S
        pauses = backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)

        async def pause(error: Exception) -> None:
            pause_s = next(pauses)
            if (
                not isinstance(error, TinsmithError)
                or error.code is not ErrorCode.UNAVAILABLE
                or (target.handle.is_live and any(stream.received))
                or time.monotonic() + pause_s >= deadline_s
            ):
                raise error
            logger.info("stream is taken up again", extra={"reason": error.reason})
            await asyncio.sleep(pause_s)

        begin = functools.partial(self._stream_once, target, request)
        async with aclosing(stream.messages(begin, pause)) as messages:
            async for message in messages:
                target.check_lease()
                about = message.prompt if message.HasField("prompt") else None
                piece = codec.decode_sequence(message.piece)
                yield StreamedPiece(message.sample_index, piece, about)

    async def record(
        self,
        target: Target,
        call_id: uuid.UUID,
        prompt: Prompt,
        request: sampler_pb2.SampleRequest,
        samples: Sequence[Sampled],
    ) -> None:
        """Keep a call of an episode; nothing for a user's.

        Raises:
            AbortedError: If the lease was lost.
            FailedPreconditionError: If the episode has ended.
        """
        episode = target.credential.episode
        if episode is None:
            return
        await self._upstream.call(
            EPISODE_SERVICE,
            "RecordModelCall",
            episode_pb2.RecordModelCallRequest(
                name=episode.name,
                request_id=str(uuid.uuid5(call_id, "record")),
                api_key=target.credential.key,
                prompt=prompt.model_input,
                sequences=[codec.encode_sequence(sampled) for sampled in samples],
                params=request.params,
            ),
            episode_pb2.RecordModelCallResponse,
            target.credential,
        )

    async def _sample(
        self, target: Target, request: sampler_pb2.SampleRequest
    ) -> sampler_pb2.SampleResponse:
        async with contextlib.AsyncExitStack() as held:
            handle = target.handle
            for is_last in (False, True):
                message = sampler_pb2.SampleRequest()
                message.CopyFrom(request)
                message.sampling_session = handle.sampling_session
                try:
                    return await self._upstream.call(
                        SAMPLER_SERVICE,
                        "Sample",
                        message,
                        sampler_pb2.SampleResponse,
                        target.credential,
                        timeout_s=_SAMPLE_TIMEOUT_S,
                    )
                except TinsmithError as error:
                    if is_last or not self._may_renew(target, error):
                        raise
                handle = await held.enter_async_context(self._renewed(target, handle))
        raise AssertionError("the loop returns or raises")

    async def _stream_once(
        self, target: Target, request: sampler_pb2.SampleRequest, received: Sequence[int]
    ) -> AsyncGenerator[sampler_pb2.StreamSampleResponse]:
        async with contextlib.AsyncExitStack() as held:
            handle = target.handle
            for is_last in (False, True):
                message = sampler_pb2.StreamSampleRequest(
                    sampling_session=handle.sampling_session,
                    request=request,
                    received_tokens=received if any(received) else (),
                )
                stream = self._upstream.stream(
                    SAMPLER_SERVICE,
                    "StreamSample",
                    message,
                    sampler_pb2.StreamSampleResponse,
                    target.credential,
                    timeout_s=_SAMPLE_TIMEOUT_S,
                )
                try:
                    async with aclosing(stream) as pieces:
                        async for piece in pieces:
                            yield piece
                    return
                except TinsmithError as error:
                    if is_last or not self._may_renew(target, error):
                        raise
                handle = await held.enter_async_context(self._renewed(target, handle))

    def _may_renew(self, target: Target, error: TinsmithError) -> bool:
        return bool(target.sources) and error.reason == _SESSION_GONE

    def _renewed(
        self, target: Target, handle: Handle
    ) -> contextlib.AbstractAsyncContextManager[Handle]:
        self._handles.forget(target.credential, handle)
        return self._handles.use(target.credential, target.sources)

    @contextlib.asynccontextmanager
    async def _episode_target(
        self, credential: Credential, episode: episode_pb2.Episode, model: str
    ) -> AsyncIterator[Target]:
        if model not in ("", episode.model, episode.sampling_session):
            raise ModelNotFoundError(
                f"the key of this episode is for the model {episode.model!r}, not {model!r}; give "
                "that name, or none",
                model=episode.model,
            )
        handle = await self._episode_handle(credential, episode)
        tokenizer = await self._tokenizers.get(handle.base_model, credential, handle.chat_template)
        lease: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # It may fail while no call waits for it.
        lease.add_done_callback(lambda done: done.cancelled() or done.exception())
        keeping = asyncio.create_task(self._keep_lease(credential, episode, lease))
        try:
            yield Target(credential, handle, tokenizer, (), lease)
        finally:
            keeping.cancel()
            lease.cancel()

    async def _episode_handle(self, credential: Credential, episode: episode_pb2.Episode) -> Handle:
        handle = self._episode_handles.get(episode.sampling_session)
        if handle is None:
            found = await self._upstream.call(
                SCHEDULER_SERVICE,
                "GetSamplingSession",
                scheduler_pb2.GetSamplingSessionRequest(name=episode.sampling_session),
                scheduler_pb2.SamplingSession,
                credential,
            )
            if len(self._episode_handles) >= _MAX_EPISODE_HANDLES:
                self._episode_handles.clear()
            handle = self._episode_handles[episode.sampling_session] = Handle.of(found)
        return handle

    async def _keep_lease(
        self, credential: Credential, episode: episode_pb2.Episode, lease: asyncio.Future[None]
    ) -> None:
        """Renew the lease of an episode while one of its calls runs."""
        while True:
            await asyncio.sleep(_renewal_interval_s(episode))
            try:
                episode = await self._upstream.call(
                    EPISODE_SERVICE,
                    "VerifyEpisodeKey",
                    episode_pb2.VerifyEpisodeKeyRequest(api_key=credential.key),
                    episode_pb2.Episode,
                    credential,
                )
            except TinsmithError as error:
                logger.warning(
                    "lease not renewed", extra={"episode": episode.name, "reason": error.reason}
                )
                if error.reason in _LEASE_GONE:
                    if not lease.done():
                        lease.set_exception(error)
                    return
            except Exception:
                logger.exception("lease not renewed by a bug", extra={"episode": episode.name})


def _renewal_interval_s(episode: episode_pb2.Episode) -> float:
    """Return a part of what is left of a lease; clocks that differ move it within bounds."""
    left_s = episode.lease_expire_time.ToNanoseconds() / 1e9 - time.time()
    return min(max(left_s / _RENEWALS_PER_LEASE, _MIN_RENEWAL_S), _MAX_RENEWAL_S)


async def _while_held(lease: asyncio.Future[None], work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return what the work returns, or raise what the lease was lost by meanwhile."""
    task = asyncio.create_task(work)
    try:
        waited: set[asyncio.Future[Any]] = {task, lease}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            lease.result()
        return await task
    finally:
        task.cancel()
