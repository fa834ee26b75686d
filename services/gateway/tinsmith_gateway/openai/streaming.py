"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinsmith_gateway.endpoint import Call, status_of
from tinsmith_gateway.openai.answered_by import AnsweredBy
from tinsmith_gateway.openai.errors import encode_error
from tinsmith_runtime.errors import TinsmithError, internal_error
from tinsmith_runtime.rpc.in_flight import AdmittedRequest

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """An answer in events; a client that goes away closes the generator behind it.

    Args:
        events: Bodies of the events.
        admission: Counts the request until the stream ends.
        headers: Further ones.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], admission: AdmittedRequest, headers: Mapping[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        # Proxies must not collect the events.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, or stop at the client's end."""
        del scope
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            await _end(sending, leaving)
            await self._events.aclose()
            self._admission.release()

    async def _send(self, send: Send) -> None:
        # What a server raises for a client that is gone is an `OSError`.
        with contextlib.suppress(OSError):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


Chunks = AsyncGenerator[dict[str, Any]]


async def begin_stream(
    call: Call,
    chunks: Chunks,
    answered_by: AnsweredBy | None = None,
    *,
    ends_with_done: bool = True,
) -> EventStream:
    """Return the answer of a stream whose first chunk is there.

    Before it, an error is an answer of its own, with a status.

    Args:
        call: The request.
        chunks: Made for the request, which is counted until their end. A chunk with a `type` is an
            event of that name.
        answered_by: Knows the sampler once the first chunk is there; None where none answers.
        ends_with_done: Whether `[DONE]` follows the last.

    Raises:
        TinsmithError: What the first chunk failed with.
        ClientDisconnect: If the client went away before.
    """
    try:
        first = await until_disconnect(call.request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    # The endpoint counts a request until its answer begins, which is too short for a stream.
    call.admission.keep()
    events = _events(first, chunks, ends_with_done=ends_with_done)
    headers = {} if answered_by is None else answered_by.headers
    return EventStream(events, call.admission, headers)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return what the work returns; it is cancelled once the client goes away.

    Raises:
        ClientDisconnect: If it went away.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        await _end(working, leaving)


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Item(Generic[ResultT]):
    value: ResultT


async def merged(streams: Sequence[AsyncGenerator[ResultT]]) -> AsyncGenerator[ResultT]:
    """Yield what several generators yield, as it comes; the first error ends all."""
    queue: asyncio.Queue[_Item[ResultT] | _End] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            found = await queue.get()
            if isinstance(found, _Item):
                yield found.value
            elif found.error is not None:
                raise found.error
            else:
                num_open -= 1
    finally:
        await _end(*tasks)


async def _pump(
    stream: AsyncGenerator[ResultT], queue: asyncio.Queue[_Item[ResultT] | _End]
) -> None:
    end = _End()
    async with contextlib.aclosing(stream):
        try:
            async for value in stream:
                await queue.put(_Item(value))
        except Exception as error:
            # Raised again by the reader of the queue.
            end = _End(error)
    await queue.put(end)


async def _events(
    first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any]], *, ends_with_done: bool
) -> AsyncGenerator[bytes]:
    async with contextlib.aclosing(chunks):
        try:
            yield _event(first)
            async for chunk in chunks:
                yield _event(chunk)
            if ends_with_done:
                yield _DONE
        except TinsmithError as error:
            logger.info("stream failed", extra={"reason": error.reason})
            yield b"event: error\n" + _event(encode_error(error, status_of(error)))
        except Exception:
            logger.exception("stream failed by a bug")
            yield b"event: error\n" + _event(encode_error(internal_error(), 500))


def _event(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {content['type']}\n".encode() if "type" in content else b""
    return name + b"data: " + text.encode() + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended; their results are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
