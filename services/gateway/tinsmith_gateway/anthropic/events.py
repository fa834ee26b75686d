"""Events of a streamed message, from the chunks of a chat completion.

A text is a block that stays open until a call or the end. A call is a block that opens and closes
at once, as its arguments are known to be a call only when they are whole. A stream that fails ends
with an event `error`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from tinsmith_gateway.anthropic.encoding import call_block, end_of, head, usage_of
from tinsmith_gateway.anthropic.errors import encode_error
from tinsmith_gateway.endpoint import status_of
from tinsmith_gateway.openai.chat import ChatCompletion
from tinsmith_gateway.openai.translation import Event, write_events
from tinsmith_runtime.errors import TinsmithError


def message_events(completion: ChatCompletion) -> AsyncGenerator[Event]:
    """Return the events of a message; see `write_events`.

    Args:
        completion: Draws the sample; its stream has the usage at the end.
    """
    return write_events(_Stream(completion), completion.chunks())


class _Stream:
    def __init__(self, completion: ChatCompletion) -> None:
        self._completion = completion
        self._num_blocks = 0
        self._is_text_open = False
        self._end: Mapping[str, Any] = {}

    def begin(self) -> Iterator[Event]:
        """Yield what comes before anything of the answer."""
        done = self._completion
        message = head(done.id, done.model, num_prompt=done.num_prompt, num_cached=done.num_cached)
        yield {"type": "message_start", "message": message}

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

    def fail(self, error: TinsmithError) -> Event:
        """Return the end of a message that failed."""
        return encode_error(error, status_of(error))

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
