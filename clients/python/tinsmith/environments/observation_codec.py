"""Observations and actions to and from protobuf messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinsmith import tensors
from tinsmith.environments.chat_messages import (
    from_chat_call,
    read_stop,
    read_tokens,
    to_chat_call,
    to_chat_message,
    to_chat_tool,
)
from tinsmith.environments.environment import (
    TEXT,
    TEXT_ALONE,
    TOKENS,
    TOOL_CALLS,
    Action,
    Observation,
)
from tinsmith.rpc.input_codec import encode_image
from tinsmith.text.tool_notations import ToolCall
from tinsmith.v1 import rollout_pb2, trajectories_pb2

_KINDS = {
    TEXT: trajectories_pb2.ACTION_KIND_TEXT,
    TOKENS: trajectories_pb2.ACTION_KIND_TOKENS,
    TOOL_CALLS: trajectories_pb2.ACTION_KIND_TOOL_CALLS,
}


def encode_observation(observation: Observation) -> trajectories_pb2.Observation:
    """Return the message of what an environment shows.

    Raises:
        ObservationError: If it is no observation.
    """
    return trajectories_pb2.Observation(
        messages=[encode_chat_message(to_chat_message(one)) for one in observation.messages],
        images=[encode_image(image) for image in observation.images],
        tools=[_encode_tool(to_chat_tool(tool)) for tool in observation.tools],
        tokens=tensors.encode_tokens(shown) if (shown := read_tokens(observation)) else None,
        **encode_stop(read_stop(observation)),
    )


def decode_tokens(message: trajectories_pb2.Observation) -> tuple[int, ...]:
    """Return the tokens that an observation shows.

    Raises:
        TensorFormatError: If they are none.
    """
    if not message.HasField("tokens"):
        return ()
    return tuple(tensors.decode_tensor(message.tokens).tolist())


def encode_action_kinds(kinds: Iterable[str]) -> list[trajectories_pb2.ActionKind.ValueType]:
    """Return the values of kinds of actions."""
    return [_KINDS[kind] for kind in sorted(kinds)]


def decode_action_kinds(values: Iterable[trajectories_pb2.ActionKind.ValueType]) -> frozenset[str]:
    """Return the kinds of actions that an environment understands; a newer one's are left out."""
    given = set(values)
    return frozenset(kind for kind, value in _KINDS.items() if value in given) or TEXT_ALONE


def encode_stop(stop: Sequence[str | int]) -> dict[str, Any]:
    """Return the fields of a message that say where an action ends."""
    return {
        "stop_strings": [each for each in stop if isinstance(each, str)],
        "stop_token_ids": [each for each in stop if not isinstance(each, str)],
    }


def decode_stop(
    message: trajectories_pb2.Observation | rollout_pb2.TrajectoryTurn,
) -> tuple[str | int, ...]:
    """Return where an action ends."""
    return (*message.stop_strings, *message.stop_token_ids)


def encode_chat_message(chat: Mapping[str, Any]) -> trajectories_pb2.ChatMessage:
    """Return the message of a chat message, which was checked."""
    message = trajectories_pb2.ChatMessage(
        role=chat["role"],
        tool_call_id=chat.get("tool_call_id", ""),
        name=chat.get("name", ""),
        tool_calls=_encode_calls(from_chat_call(call) for call in chat.get("tool_calls", ())),
    )
    if isinstance(chat["content"], str):
        message.content = chat["content"]
        return message
    for part in chat["content"]:
        if part["type"] == "text":
            message.parts.add(text=part["text"])
        else:
            message.parts.add(image=trajectories_pb2.ImagePlace())
    return message


def decode_chat_message(message: trajectories_pb2.ChatMessage) -> dict[str, Any]:
    """Return a chat message as chat templates read it."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        chat["content"] = [
            {"type": "image"}
            if part.WhichOneof("content") == "image"
            else {"type": "text", "text": part.text}
            for part in message.parts
        ]
    if message.tool_calls:
        chat["tool_calls"] = [
            to_chat_call(ToolCall(call.name, call.arguments_json, call.id))
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    if message.name:
        chat["name"] = message.name
    return chat


def decode_tool(message: trajectories_pb2.Tool) -> dict[str, Any]:
    """Return a tool as chat templates read it.

    Raises:
        ValueError: If its schema is no JSON.
    """
    parameters = json.loads(message.parameters_json) if message.parameters_json else {}
    function = {
        "name": message.name,
        "description": message.description,
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def encode_action(action: str | Sequence[int] | Action) -> trajectories_pb2.Action:
    """Return the message of an action: text, token ids, or an `Action`."""
    if isinstance(action, str):
        return trajectories_pb2.Action(text=action)
    if not isinstance(action, Action):
        return trajectories_pb2.Action(tokens=tensors.encode_tokens(action))
    message = trajectories_pb2.Action(tool_calls=_encode_calls(action.tool_calls))
    if action.tokens is not None:
        message.tokens.CopyFrom(tensors.encode_tokens(action.tokens))
    else:
        message.text = action.text or ""
    return message


def _encode_tool(chat: Mapping[str, Any]) -> trajectories_pb2.Tool:
    function = chat["function"]
    return trajectories_pb2.Tool(
        name=function["name"],
        description=function["description"],
        parameters_json=json.dumps(function["parameters"], ensure_ascii=False),
    )


def _encode_calls(calls: Iterable[ToolCall]) -> list[trajectories_pb2.ToolCall]:
    return [
        trajectories_pb2.ToolCall(name=call.name, arguments_json=call.arguments, id=call.id)
        for call in calls
    ]
