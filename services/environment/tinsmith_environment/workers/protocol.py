"""What the pod and its worker processes say to each other: length-prefixed JSON over a socket.

JSON and not pickle, because a worker runs code that the pod must not trust: a reply can be wrong,
it cannot run anything. A frame is four bytes of length, big-endian, and UTF-8 JSON. The worker
checks what an environment returned before it is sent, so that a wrong type is reported as the
environment's fault, with its name.
"""

from __future__ import annotations

import base64
import json
import math
import numbers
import struct
from collections.abc import Mapping
from typing import Any

from tinsmith.environments.chat_messages import (
    ObservationError,
    from_chat_message,
    from_chat_tool,
    place_images,
    read_stop,
    read_tokens,
    to_chat_message,
    to_chat_tool,
)
from tinsmith.environments.environment import ACTION_KINDS
from tinsmith.images import ImageError, image_size
from tinsmith_environment.environment import Action, Image, Observation, StepResult, ToolCall
from tinsmith_runtime import json_parts

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 64 * 2**20
MAX_PARTS = 2**19
"""Lists, objects and members of a message: each becomes an object of some sixty bytes."""
MAX_VALUES = 2**22
"""Commas of a message, outside its texts."""


class FrameError(ValueError):
    """Bytes that are not a frame, or a value that has no JSON form."""


def encode_frame(value: Mapping[str, Any], *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the bytes of a message.

    Raises:
        FrameError: If the value is not JSON, too large, or one of too many values.
    """
    try:
        body = json.dumps(value, allow_nan=False, default=_to_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(str(error)) from error
    if len(body) > max_bytes:
        raise FrameError(f"{len(body)} bytes exceed the limit of {max_bytes}")
    _check_values(body)
    return HEADER.pack(len(body)) + body


def decode_length(header: bytes) -> int:
    """Return the length of the body that follows a header.

    Raises:
        FrameError: If it is over the limit.
    """
    length: int = HEADER.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return length


def decode_body(body: bytes) -> dict[str, Any]:
    """Return the message of a body.

    Raises:
        FrameError: If it is not a JSON object, or one of too many values.
    """
    _check_values(body)
    try:
        # Of bytes, it would take other encodings too, whose values were not counted.
        value = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FrameError(f"expected an object, got {type(value).__name__}")
    return value


def _check_values(body: bytes) -> None:
    if json_parts.has_more(body, MAX_VALUES, json_parts.VALUES) or json_parts.has_more(
        body, MAX_PARTS, json_parts.PARTS
    ):
        raise FrameError(
            f"more than {MAX_PARTS} lists, objects and members, or {MAX_VALUES} values"
        )


def encode_action(action: Action) -> dict[str, Any]:
    """Return the JSON form of an action."""
    if action.text is None:
        return {"tokens": list(action.tokens or ())}
    calls = [[call.name, call.arguments, call.id] for call in action.tool_calls]
    return {"text": action.text, "tool_calls": calls}


def decode_action(value: Mapping[str, Any]) -> Action:
    """Return the action of its JSON form."""
    if "text" in value:
        calls = tuple(ToolCall(*call) for call in value["tool_calls"])
        return Action(text=value["text"], tool_calls=calls)
    return Action(tokens=tuple(value["tokens"]))


def encode_observation(observation: object) -> dict[str, Any]:
    """Return the JSON form of what an environment returned as its observation.

    Raises:
        FrameError: If it is not an observation.
    """
    if not isinstance(observation, Observation):
        raise FrameError(f"expected an Observation, got {type(observation).__name__}")
    try:
        messages = [to_chat_message(message) for message in observation.messages]
        place_images(messages, len(observation.images))
        return {
            "messages": messages,
            "images": [_encode_image(image) for image in observation.images],
            "tools": [to_chat_tool(tool) for tool in observation.tools],
            "stop": read_stop(observation),
            "tokens": read_tokens(observation),
        }
    except ObservationError as error:
        raise FrameError(str(error)) from error


def decode_observation(value: Mapping[str, Any]) -> Observation:
    """Return the observation of its JSON form."""
    return Observation(
        tuple(from_chat_message(chat) for chat in value["messages"]),
        tuple(Image(base64.b64decode(data), kind) for kind, data in value["images"]),
        tuple(from_chat_tool(chat) for chat in value["tools"]),
        tuple(value["stop"]),
        tuple(value["tokens"]),
    )


def decode_action_kinds(value: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of actions that a worker says that an environment understands.

    Raises:
        FrameError: If it says none.
    """
    kinds = value.get("action_kinds")
    if not isinstance(kinds, list) or not all(kind in ACTION_KINDS for kind in kinds) or not kinds:
        raise FrameError("action_kinds of a reply are none")
    return frozenset(kinds)


def _encode_image(image: object) -> list[str]:
    """Return the JSON form of an image, whose header was read.

    Raises:
        ObservationError: If it is none.
    """
    try:
        if not (isinstance(image, Image) and isinstance(image.data, bytes)):
            raise ObservationError(f"expected an Image of bytes, got {type(image).__name__}")
        image_size(image.data, image.format)
    except ImageError as error:
        raise ObservationError(str(error)) from error
    return [image.format, base64.b64encode(image.data).decode()]


def encode_result(result: object) -> dict[str, Any]:
    """Return the JSON form of what an environment returned from `step`.

    Raises:
        FrameError: If it is not a step result, its reward is not a finite number, or `done` is
            neither True nor False.
    """
    if not isinstance(result, StepResult):
        raise FrameError(f"expected a StepResult, got {type(result).__name__}")
    given, done = _scalar(result.reward), _scalar(result.done)
    if not isinstance(given, numbers.Real):
        raise FrameError(f"reward must be a number, got {type(given).__name__}")
    try:
        reward = float(given)
    except OverflowError as error:
        raise FrameError("reward must be finite, got an integer that no float holds") from error
    if not math.isfinite(reward):
        raise FrameError(f"reward must be finite, got {reward}")
    if not isinstance(done, bool):
        raise FrameError(f"done must be True or False, got {type(done).__name__}")
    return {
        "observation": encode_observation(result.observation),
        "reward": reward,
        "done": done,
        "info": dict(result.info),
    }


def decode_result(value: Mapping[str, Any]) -> StepResult:
    """Return the step result of its JSON form."""
    return StepResult(
        decode_observation(value["observation"]), value["reward"], value["done"], value["info"]
    )


def _scalar(value: object) -> object:
    """Return a value of numpy or torch as a plain one, and anything else as it is."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _to_plain(value: object) -> object:
    """Return numpy scalars and arrays, which environments put into `info`, as plain values."""
    plain = _scalar(value)
    if plain is not value:
        return plain
    raise TypeError(f"{type(value).__name__} has no JSON form")
