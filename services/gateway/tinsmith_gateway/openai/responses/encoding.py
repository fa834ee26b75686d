"""Responses in the form of the Responses API, from what a chat completion says."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith_gateway.openai.responses.bodies import ResponsesBody


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What a response says of itself from its beginning on.

    Attributes:
        id: Of the call.
        model: As the request names it, or the episode.
        created_at: Seconds since 1970.
        body: The request.
    """

    id: str
    model: str
    created_at: float
    body: ResponsesBody

    def encode(
        self,
        status: str,
        *,
        output: Sequence[Mapping[str, Any]] = (),
        usage: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the response.

        Args:
            status: `in_progress`, `completed`, `incomplete` or `failed`.
            output: Its items.
            usage: As a chat completion has it.
            error: Why it failed.
        """
        body = self.body
        text = {"format": {"type": "text"}}
        if body.text is not None and body.text.format is not None:
            text = {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
        is_incomplete = status == "incomplete"
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created_at,
            "completed_at": time.time() if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": text,
            "tool_choice": body.tool_choice or "auto",
            "tools": [_tool(tool.model_dump()) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def whole_response(head: Head, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response that a whole chat completion is."""
    choice = answer["choices"][0]
    message = choice["message"]
    status = status_of(choice["finish_reason"])
    calls = message.get("tool_calls") or []
    output = []
    if message["content"] or not calls:
        logprobs = logprobs_of(choice["logprobs"])
        part = text_part(message["content"] or "", logprobs)
        output.append(message_item(new_id("msg"), status, [part]))
    output += [call_item(new_id("fc"), call) for call in calls]
    return head.encode(status, output=output, usage=answer["usage"])


def status_of(finish_reason: str) -> str:
    """Return the status of a response by why its sample ended."""
    return "incomplete" if finish_reason == "length" else "completed"


def new_id(kind: str) -> str:
    """Return the id of an item."""
    return f"{kind}_{secrets.token_hex(16)}"


def message_item(item_id: str, status: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an item of text."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": list(parts),
    }


def text_part(text: str, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a part of text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(item_id: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of a call, given as a chat completion has it; incomplete if it is cut."""
    function = call["function"]
    try:
        json.loads(function["arguments"])
        status = "completed"
    except ValueError:
        status = "incomplete"
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
    }


def logprobs_of(logprobs: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return log-probabilities of tokens, given as a chat completion has them."""
    entries = [] if logprobs is None else logprobs["content"]
    return [
        {**_scored(entry), "top_logprobs": [_scored(other) for other in entry["top_logprobs"]]}
        for entry in entries
    ]


def _scored(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "token": entry["token"],
        "bytes": entry["bytes"] or [],
        "logprob": entry["logprob"],
    }


def _tool(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "strict": bool(fields["strict"])}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
