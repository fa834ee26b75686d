"""Samples in the background: promised first, drawn from a seed that is kept with the promise.

The SDK submits many samples at once and asks for each until it is there. A sample is a row before
it is acknowledged, and its seed is part of the row; so after a restart what had not ended is drawn
again, and gives the same tokens wherever the weights are fixed. While the sampler is full or away,
a sample waits and says so; it never fails for that.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tinsmith.backoff import backoff
from tinsmith.v1 import sampler_pb2, scheduler_pb2
from tinsmith_gateway.access.authentication import Callers
from tinsmith_gateway.metrics import PENDING_SAMPLES
from tinsmith_gateway.project_threads import ProjectThreads
from tinsmith_gateway.tinker.promises import usage
from tinsmith_gateway.tinker.promises.future_store import SAMPLE, FutureRecord, FutureStore
from tinsmith_gateway.tinker.promises.usage import HourlyUsage
from tinsmith_gateway.tinker.sampling.recordings import Recordings
from tinsmith_gateway.tinker.wire import bodies, sample_codec
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_gateway.upstream.routing import SAMPLER_SERVICE, SCHEDULER_SERVICE
from tinsmith_runtime.errors import (
    AbortedError,
    ErrorCode,
    InvalidFieldError,
    QueueFullError,
    TinsmithError,
    internal_error,
)

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 3600.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_REFUSAL_RETRY_S = 1.0
_MAX_RUNNING = 1024
_MAX_KNOWN_SESSIONS = 10_000
_MAX_PENDING_PER_PROJECT = 16_384
_MAX_PENDING_BYTES_PER_PROJECT = 2**30


class _PromisedSample(bodies.Sample):
    """A sample as it is kept, with the key that is charged; empty on one of an older release."""

    charged_key: str = ""


@dataclass(slots=True)
class _Pending:
    """A sample that has not ended."""

    project: str
    future: str
    sampling_session: str
    body: _PromisedSample
    num_bytes: int
    waiting_for: str = "a free place at the gateway"
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    drawing: asyncio.Task[bytes] | None = None
    is_cancelled: bool = False


class Samples:
    """The samples of all projects.

    Args:
        store: Where promises and results are kept.
        upstream: Calls samplers.
        callers: Makes the credential of work that goes on without its client.
        usage_: Counts tokens.
        threads: Run what reading and writing costs.
    """

    def __init__(
        self,
        store: FutureStore,
        upstream: Upstream,
        callers: Callers,
        usage_: HourlyUsage,
        threads: ProjectThreads,
    ) -> None:
        self._store = store
        self._upstream = upstream
        self._callers = callers
        self._usage = usage_
        self._recordings = Recordings(store, threads)
        self._threads = threads
        self._pending: dict[tuple[str, str], _Pending] = {}
        self._num_pending: Counter[str] = Counter()
        self._num_pending_bytes: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = asyncio.Semaphore(_MAX_RUNNING)
        self._changed: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._is_stopping = False
        self._base_models: dict[str, str] = {}

    async def load(self) -> None:
        """Go on with what was promised before a restart."""
        for record in await self._store.pending(SAMPLE):
            body = _PromisedSample.model_validate_json(record.request)
            self._start(record.future, record.project, record.owner, body, len(record.request))

    async def stop(self) -> None:
        """Stop drawing; what has not ended goes on after the next start."""
        self._is_stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(
        self,
        project: str,
        sampling_session: str,
        future: str,
        body: bodies.Sample,
        *,
        key_id: str,
    ) -> None:
        """Promise a sample; a repeat changes nothing.

        Args:
            project: Id of the project.
            sampling_session: Resource name of what is sampled from.
            future: Id of the promise.
            body: What is asked for, seed included.
            key_id: The key that is charged.

        Raises:
            QueueFullError: If too many samples of the project wait.
        """
        if (project, future) in self._pending:
            return
        kept = _PromisedSample.model_construct(**dict(body), charged_key=key_id)
        dump = functools.partial(kept.model_dump_json, exclude_none=True)
        request = (await self._threads.run(project, dump)).encode()
        num_pending, num_bytes = self._num_pending[project], self._num_pending_bytes[project]
        is_too_large = num_bytes and num_bytes + len(request) > _MAX_PENDING_BYTES_PER_PROJECT
        if num_pending >= _MAX_PENDING_PER_PROJECT or is_too_large:
            raise QueueFullError(
                f"{num_pending} samples of the project wait, {num_bytes} bytes; retry when some "
                "have ended",
                retry_after_s=_REFUSAL_RETRY_S,
            )
        is_new = await self._store.add(
            project, future, SAMPLE, owner=sampling_session, request=request
        )
        if is_new and not self._is_stopping:
            self._start(future, project, sampling_session, kept, len(request))

    async def wait(self, project: str, future: str, timeout_s: float) -> FutureRecord | str | None:
        """Return a sample that ended, else what it waits for; None if it is not known.

        Args:
            project: Id of the project.
            future: Id of the promise.
            timeout_s: How long to wait for its end.
        """
        pending = self._pending.get((project, future))
        if pending is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await pending.ended.wait()
            except TimeoutError:
                return pending.waiting_for
        record = await self._store.get(project, future)
        if record is not None and not record.is_ended:
            return "the gateway to start again"
        return record

    async def cancel(self, project: str, future: str) -> None:
        """Give a sample up, and its place at the sampler; one that ended stays as it is."""
        pending = self._pending.get((project, future))
        if pending is None:
            return
        pending.is_cancelled = True
        if pending.drawing is not None:
            # The drawing alone: its end is kept undisturbed, however often this is asked for.
            pending.drawing.cancel()
        await pending.ended.wait()

    async def wait_any(self, sampling_session: str, timeout_s: float) -> None:
        """Return once a sample of a session ends, or time is up."""
        event = asyncio.Event()
        waiters = self._changed[sampling_session]
        waiters.add(event)
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return
        finally:
            waiters.discard(event)
            if not waiters:
                self._changed.pop(sampling_session, None)

    def _start(
        self,
        future: str,
        project: str,
        sampling_session: str,
        body: _PromisedSample,
        num_bytes: int,
    ) -> None:
        pending = _Pending(project, future, sampling_session, body, num_bytes)
        self._pending[project, future] = pending
        self._num_pending[project] += 1
        self._num_pending_bytes[project] += num_bytes
        PENDING_SAMPLES.inc()
        task = asyncio.create_task(self._draw(future, pending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _draw(self, future: str, pending: _Pending) -> None:
        try:
            result, error = await self._drawn(future, pending)
            await self._keep(future, pending, result, error)
        finally:
            self._forget(future, pending)

    async def _keep(
        self, future: str, pending: _Pending, result: bytes | None, error: TinsmithError | None
    ) -> None:
        """Keep how a sample ended, however long the database is away: its client waits for it.

        A gateway that stops meanwhile leaves it promised, and draws it again after its start.
        """
        for pause_s in backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S):
            try:
                await self._store.finish(pending.project, future, result=result, error=error)
            except TinsmithError as failure:
                logger.warning(
                    "the end of a sample is not kept yet",
                    extra={"future": future, "reason": failure.reason},
                )
            else:
                return
            pending.waiting_for = "the database of the gateway, which is away"
            await asyncio.sleep(pause_s)

    async def _drawn(
        self, future: str, pending: _Pending
    ) -> tuple[bytes | None, TinsmithError | None]:
        """Return how a sample ended; it is cancelled as this is, or by its client."""
        cancelled = AbortedError("the sample was cancelled by its client")
        if pending.is_cancelled:
            return None, cancelled
        pending.drawing = asyncio.create_task(self._sample_in_turn(pending))
        try:
            return await pending.drawing, None
        except asyncio.CancelledError:
            if self._is_stopping or not pending.is_cancelled:
                raise
            return None, cancelled
        except TinsmithError as failure:
            return None, failure
        except Exception:
            logger.exception("sample failed by a bug", extra={"future": future})
            return None, internal_error()

    def _forget(self, future: str, pending: _Pending) -> None:
        self._pending.pop((pending.project, future), None)
        self._num_pending[pending.project] -= 1
        self._num_pending_bytes[pending.project] -= pending.num_bytes
        if not self._num_pending[pending.project]:
            del self._num_pending[pending.project], self._num_pending_bytes[pending.project]
        PENDING_SAMPLES.dec()
        pending.ended.set()
        for event in self._changed.get(pending.sampling_session, ()):
            event.set()

    async def _sample_in_turn(self, pending: _Pending) -> bytes:
        async with self._running:
            return await self._sample(pending)

    async def _sample(self, pending: _Pending) -> bytes:
        body = pending.body
        request = await self._threads.run(
            pending.project, sample_codec.decode_sample, body, pending.sampling_session
        )
        request.weight_updates = sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT
        credential = self._callers.for_pods(pending.project, charged_key=body.charged_key)
        pauses = backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)

        def wait_for(what: str) -> None:
            pending.waiting_for = what

        wait_for("")
        while True:
            try:
                response = await self._upstream.call(
                    SAMPLER_SERVICE,
                    "Sample",
                    request,
                    sampler_pb2.SampleResponse,
                    credential,
                    timeout_s=_CALL_TIMEOUT_S,
                    on_wait=wait_for,
                )
                break
            except TinsmithError as error:
                is_full = error.code is ErrorCode.RESOURCE_EXHAUSTED
                may_pass = error.code is ErrorCode.UNAVAILABLE or is_full
                if not may_pass or error.retry_after_s is None:
                    raise
                wait_for(error.message)
            await asyncio.sleep(next(pauses))
        if body.record_stability_info:
            await self._recordings.keep(
                pending.project, pending.sampling_session, pending.future, request.prompt, response
            )
        await self._count(pending, response)
        encoded = await self._threads.run(
            pending.project, sample_codec.encode_sampled, response, body.target_prompt_logprobs
        )
        return encoded.SerializeToString()

    async def _count(self, pending: _Pending, response: sampler_pb2.SampleResponse) -> None:
        base_model = await self._base_model(pending)
        session = pending.sampling_session.rpartition("/")[2].rpartition("-sample-")[0]
        num_prompt = count_prompt_tokens(pending.body)
        cached = min(response.num_cached_prompt_tokens, num_prompt)
        sampled = sum(sequence.tokens.shape[0] for sequence in response.sequences)
        for kind, count in (
            (usage.PREFILL, num_prompt - cached),
            (usage.PREFILL_CACHED, cached),
            (usage.SAMPLED, sampled),
        ):
            self._usage.add(pending.project, session, base_model, kind, count)

    async def _base_model(self, pending: _Pending) -> str:
        """Return what a handle samples from; empty if it is gone by now."""
        known = self._base_models.get(pending.sampling_session)
        if known is None:
            request = scheduler_pb2.GetSamplingSessionRequest(name=pending.sampling_session)
            try:
                found = await self._upstream.call(
                    SCHEDULER_SERVICE,
                    "GetSamplingSession",
                    request,
                    scheduler_pb2.SamplingSession,
                    self._callers.for_pods(pending.project),
                )
            except TinsmithError:
                return ""
            if len(self._base_models) >= _MAX_KNOWN_SESSIONS:
                self._base_models.clear()
            known = self._base_models[pending.sampling_session] = found.base_model
        return known


def count_prompt_tokens(body: bodies.Sample) -> int:
    """Return how many text tokens a prompt holds."""
    chunks = body.prompt.chunks
    return sum(len(chunk.tokens) for chunk in chunks if isinstance(chunk, bodies.TextChunk))


def check(body: bodies.Sample, sampling_session: str) -> None:
    """Refuse a request that cannot be put into native words, before it is promised.

    Raises:
        InvalidFieldError: It names the field.
    """
    if not body.prompt.chunks:
        raise InvalidFieldError("prompt.chunks", "must not be empty")
    sample_codec.decode_sample(body, sampling_session)
