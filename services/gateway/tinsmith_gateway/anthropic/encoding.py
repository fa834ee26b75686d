"""Messages in Anthropic's form, from what a chat completion says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def head(message_id: str, model: str, *, num_prompt: int, num_cached: int) -> dict[str, Any]:
    """Return what a message says before anything of its answer.

    Args:
        message_id: Of the call.
        model: As the request names it.
        num_prompt: Tokens of the prompt.
        num_cached: Those of them that were in the cache.
    """
    return {
        "id": f"msg_{message_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_of(num_prompt, num_cached, 0),
    }


def whole_message(
    message_id: str, model: str, answer: Mapping[str, Any], stop_string: str | None
) -> dict[str, Any]:
    """Return the message that a whole chat completion is.

    Args:
        message_id: Of the call.
        model: As the request names it.
        answer: The completion.
        stop_string: Which stop string ended it.
    """
    choice, usage = answer["choices"][0], answer["usage"]
    said = choice["message"]
    content = [{"type": "text", "text": said["content"]}] if said["content"] else []
    content += [call_block(call) for call in said.get("tool_calls") or ()]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    begun = head(message_id, model, num_prompt=usage["prompt_tokens"], num_cached=num_cached)
    return {
        **begun,
        "content": content,
        **end_of(choice["finish_reason"], stop_string),
        "usage": usage_of(usage["prompt_tokens"], num_cached, usage["completion_tokens"]),
    }


def end_of(finish_reason: str, stop_string: str | None) -> dict[str, Any]:
    """Return why a message ended, by why its sample did."""
    if finish_reason == "stop" and stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": _STOP_REASONS[finish_reason], "stop_sequence": None}


def usage_of(num_prompt: int, num_cached: int, num_sampled: int) -> dict[str, Any]:
    """Return the usage of a call; tokens of the cache are counted apart from other input."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_sampled,
    }


def call_block(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a chat completion as a block."""
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": json.loads(function["arguments"]),
    }
