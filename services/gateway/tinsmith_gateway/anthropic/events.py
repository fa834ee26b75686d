"""Events of a streamed message, from the chunks of a chat completion.

A text is a block that stays open until a call or the end. A call is a block that opens and closes
at once, as its arguments are known to be a call only when they are whole. A stream that fails ends
with an event `error`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from tinsmith_gateway.anthropic.encoding import call_block, end_of, head, usage_of
from tinsmith_gateway.anthropic.errors import encode_error
from tinsmith_gateway.endpoint import status_of
from tinsmith_gateway.openai.chat import ChatCompletion
from tinsmith_runtime.errors import TinsmithError, internal_error

logger = logging.getLogger(__name__)

Event = dict[str, Any]


async def message_events(completion: ChatCompletion) -> AsyncGenerator[Event]:
    """Yield the events of a message.

    Args:
        completion: Draws the sample; its stream has the usage at the end.

    Raises:
        TinsmithError: What the completion failed with before its first chunk.
    """
    stream = _Stream(completion)
    has_begun = False
    async with contextlib.aclosing(completion.chunks()) as chunks:
        try:
            async for chunk in chunks:
                if not has_begun:
                    has_begun = True
                    yield stream.begin()
                for event in stream.push(chunk):
                    yield event
        except TinsmithError as error:
            if not has_begun:
                raise
            logger.info("stream failed", extra={"reason": error.reason})
            yield encode_error(error, status_of(error))
        except Exception:
            if not has_begun:
                raise
            logger.exception("stream failed by a bug")
            yield encode_error(internal_error(), 500)


class _Stream:
    def __init__(self, completion: ChatCompletion) -> None:
        self._completion = completion
        self._num_blocks = 0
        self._is_text_open = False
        self._end: Mapping[str, Any] = {}

    def begin(self) -> Event:
        """Return what comes before anything of the answer."""
        done = self._completion
        message = head(done.id, done.model, num_prompt=done.num_prompt, num_cached=done.num_cached)
        return {"type": "message_start", "message": message}

    def push(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield what a chunk brings."""
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                yield from self._add_text(delta["content"])
            for call in delta.get("tool_calls") or ():
                yield from self._close_text()
                yield from self._add_call(call)
            if choice["finish_reason"]:
                yield from self._close_text()
                self._end = end_of(choice["finish_reason"], self._completion.stop_string)
        if chunk.get("usage"):
            usage = chunk["usage"]
            num_cached = usage["prompt_tokens_details"]["cached_tokens"]
            yield {
                "type": "message_delta",
                "delta": dict(self._end),
                "usage": usage_of(usage["prompt_tokens"], num_cached, usage["completion_tokens"]),
            }
            yield {"type": "message_stop"}

    def _add_text(self, text: str) -> Iterator[Event]:
        if not self._is_text_open:
            self._is_text_open = True
            yield self._event("content_block_start", content_block={"type": "text", "text": ""})
        yield self._event("content_block_delta", delta={"type": "text_delta", "text": text})

    def _close_text(self) -> Iterator[Event]:
        if self._is_text_open:
            self._is_text_open = False
            yield self._close()

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        yield self._event("content_block_start", content_block={**call_block(call), "input": {}})
        arguments = call["function"]["arguments"]
        delta = {"type": "input_json_delta", "partial_json": arguments}
        yield self._event("content_block_delta", delta=delta)
        yield self._close()

    def _close(self) -> Event:
        event = self._event("content_block_stop")
        self._num_blocks += 1
        return event

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": self._num_blocks, **fields}
