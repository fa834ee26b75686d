"""Events of a streamed response, from the chunks of a chat completion.

A text is an item that stays open until a call or the end. A call is an item that opens and closes
at once, as its arguments are known to be a call only when they are whole. A stream that fails ends
with `response.failed`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from tinsmith_gateway.openai.responses.encoding import (
    Head,
    call_item,
    logprobs_of,
    message_item,
    new_id,
    status_of,
    text_part,
)
from tinsmith_gateway.openai.translation import Event, write_events
from tinsmith_runtime.errors import TinsmithError


def response_events(head: Head, chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[Event]:
    """Return the events of a response; see `write_events`.

    Args:
        head: Of the response.
        chunks: Of the chat completion, with its usage at the end.
    """
    return write_events(_Stream(head), chunks)


class _Stream:
    def __init__(self, head: Head) -> None:
        self._head = head
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._text: _Text | None = None
        self._status = "completed"

    def begin(self) -> Iterator[Event]:
        """Yield what comes before anything of the answer."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._head.encode("in_progress"))

    def push(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield what a chunk brings."""
        for choice in chunk["choices"]:
            delta = choice["delta"]
            logprobs = logprobs_of(choice["logprobs"])
            if delta.get("content") or logprobs:
                yield from self._add_text(delta.get("content") or "", logprobs)
            for call in delta.get("tool_calls") or ():
                yield from self._close_text("completed")
                yield from self._add_call(call)
            if choice["finish_reason"]:
                self._status = status_of(choice["finish_reason"])
                if not self._output and self._text is None:
                    yield from self._add_text("", [])
                yield from self._close_text(self._status)
        if chunk.get("usage"):
            response = self._head.encode(self._status, output=self._output, usage=chunk["usage"])
            yield self._event(f"response.{self._status}", response=response)

    def fail(self, error: TinsmithError) -> Event:
        """Return the end of a response that failed."""
        problem = {"code": "server_error", "message": error.message}
        response = self._head.encode("failed", output=self._output, error=problem)
        return self._event("response.failed", response=response)

    def _add_text(self, delta: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        index = len(self._output)
        if self._text is None:
            self._text = _Text(new_id("msg"))
            item = message_item(self._text.id, "in_progress", [])
            yield self._event("response.output_item.added", output_index=index, item=item)
            yield self._event(
                "response.content_part.added", **self._place(), part=text_part("", [])
            )
        self._text.text += delta
        self._text.logprobs += logprobs
        yield self._event(
            "response.output_text.delta", **self._place(), delta=delta, logprobs=logprobs
        )

    def _close_text(self, status: str) -> Iterator[Event]:
        if self._text is None:
            return
        text, place = self._text, self._place()
        part = text_part(text.text, text.logprobs)
        yield self._event(
            "response.output_text.done", **place, text=text.text, logprobs=text.logprobs
        )
        yield self._event("response.content_part.done", **place, part=part)
        self._text = None
        yield from self._end_item(message_item(text.id, status, [part]))

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        item = call_item(new_id("fc"), call)
        place = {"output_index": len(self._output), "item_id": item["id"]}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=len(self._output), item=begun)
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", **place, delta=item["arguments"])
        yield self._event(f"{name}.done", **place, name=item["name"], arguments=item["arguments"])
        yield from self._end_item(item)

    def _end_item(self, item: dict[str, Any]) -> Iterator[Event]:
        index = len(self._output)
        self._output.append(item)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _place(self) -> dict[str, Any]:
        assert self._text is not None
        return {"output_index": len(self._output), "content_index": 0, "item_id": self._text.id}

    def _event(self, kind: str, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **fields}


class _Text:
    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
