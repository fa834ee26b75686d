"""Conversations to prompts, by the model's own chat template; nothing is added to what was said.

Messages are given in the forms that the template shows, and none is lost (`Tokenizer`). Whether a
template takes tools is decided in `chat`.
"""

from __future__ import annotations

import base64
import binascii
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tinsmith.errors
from tinsmith.tensors import encode_tokens
from tinsmith.v1 import trajectories_pb2
from tinsmith_gateway.tokenizing.model_tokenizer import ChatTokenizer
from tinsmith_runtime.errors import EmptyBatchError, InvalidFieldError

_DATA_URL = re.compile(r"data:image/(png|jpe?g);base64,(.*)", re.DOTALL)
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Marks where the final message ends; transformers finds the place in the same way.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model reads.

    Attributes:
        tokens: Token ids; one placeholder for each image.
        model_input: The same with the images in the places of their placeholders.
    """

    tokens: tuple[int, ...]
    model_input: trajectories_pb2.ModelInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What is rendered.

    Attributes:
        messages: As they were sent.
        tools: Schemas that the model is shown; None for none.
        add_generation_prompt: Whether the assistant's turn is begun.
        continue_final_message: Whether the last message is left open to be continued.
        variables: Further variables of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any]


def prompt_of_tokens(tokens: Sequence[int]) -> Prompt:
    """Return the prompt of token ids.

    Raises:
        EmptyBatchError: If there are none.
    """
    if not tokens:
        raise EmptyBatchError("prompt", "has no token")
    model_input = trajectories_pb2.ModelInput()
    model_input.chunks.add(tokens=encode_tokens(tokens))
    return Prompt(tuple(tokens), model_input)


def render(conversation: Conversation, tokenizer: ChatTokenizer) -> Prompt:
    """Return the prompt of a conversation. Takes milliseconds: not for the event loop.

    Raises:
        InvalidFieldError: If the template refuses it, or an image has no place in it.
    """
    if tokenizer.chat_template is None:
        raise InvalidFieldError(
            "messages", "cannot be rendered: the model has no chat template; use /v1/completions"
        )
    messages, images = _read_messages(conversation.messages)
    if images and tokenizer.image_token is None:
        raise InvalidFieldError("messages", "hold an image; the model reads no images")
    tokens = tokenizer.encode(
        _render_text(conversation, messages, tokenizer), add_special_tokens=False
    )
    return _place_images(tokens, images, tokenizer.image_token)


def _render_text(
    conversation: Conversation, messages: list[dict[str, Any]], tokenizer: ChatTokenizer
) -> str:
    reserved = _RESERVED.intersection(conversation.variables)
    if reserved:
        raise InvalidFieldError("chat_template_kwargs", f"must not hold {sorted(reserved)}")
    if conversation.continue_final_message:
        _mark_end(messages)
    try:
        text = tokenizer.render_chat_template(
            messages,
            add_generation_prompt=conversation.add_generation_prompt,
            tools=conversation.tools,
            **conversation.variables,
        )
    except (
        tinsmith.errors.InvalidArgumentError,
        tinsmith.errors.FailedPreconditionError,
    ) as error:
        raise InvalidFieldError("messages", f"cannot be rendered: {error}") from error
    return _cut_at_mark(text) if conversation.continue_final_message else text


def _mark_end(messages: list[dict[str, Any]]) -> None:
    content = messages[-1].get("content")
    if isinstance(content, list):
        texts = [part for part in content if isinstance(part.get("text"), str)]
        if texts:
            texts[-1]["text"] += _END_MARK
            return
    elif isinstance(content, str):
        messages[-1]["content"] = content + _END_MARK
        return
    raise InvalidFieldError("continue_final_message", "needs a text in the last message")


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_END_MARK.strip())
    if position < 0:
        raise InvalidFieldError(
            "continue_final_message", "is not possible: the template leaves out the last message"
        )
    is_whole = text[position : position + len(_END_MARK)] == _END_MARK
    # A template that trims messages would have trimmed the end of this one.
    return text[:position] if is_whole else text[:position].rstrip()


def _read_messages(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[trajectories_pb2.ImageChunk]]:
    """Return the messages as templates know them, and their images in order."""
    read: list[dict[str, Any]] = []
    images: list[trajectories_pb2.ImageChunk] = []
    for index, original in enumerate(messages):
        message = copy.deepcopy(dict(original))
        content = message.get("content")
        if isinstance(content, list):
            field = f"messages.{index}.content"
            message["content"] = [_read_part(part, field, images) for part in content]
        read.append(message)
    return read, images


def _read_part(part: Any, field: str, images: list[trajectories_pb2.ImageChunk]) -> dict[str, Any]:
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if part.get("type") == "image_url":
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        images.append(_read_image(url, field))
        return {"type": "image"}
    raise InvalidFieldError(field, "has a part that is neither text nor image_url")


def _read_image(url: Any, field: str) -> trajectories_pb2.ImageChunk:
    match = _DATA_URL.fullmatch(url) if isinstance(url, str) else None
    if match is None:
        raise InvalidFieldError(
            field,
            "has an image that is no data: URL of a PNG or JPEG; the server fetches nothing, send "
            "'data:image/png;base64,...'",
        )
    try:
        data = base64.b64decode(match[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidFieldError(field, "has an image that is not base64") from error
    return trajectories_pb2.ImageChunk(data=data, format="png" if match[1] == "png" else "jpeg")


def _place_images(
    tokens: list[int], images: list[trajectories_pb2.ImageChunk], image_token: int | None
) -> Prompt:
    if not images:
        return prompt_of_tokens(tokens)
    places = [index for index, token in enumerate(tokens) if token == image_token]
    if len(places) != len(images):
        raise InvalidFieldError(
            "messages",
            f"hold {len(images)} images, and the rendered conversation {len(places)} places for "
            "them; a text must not hold the placeholder of an image",
        )
    model_input = trajectories_pb2.ModelInput()
    begin = 0
    for place, image in zip(places, images, strict=True):
        if place > begin:
            model_input.chunks.add(tokens=encode_tokens(tokens[begin:place]))
        model_input.chunks.add(image=image)
        begin = place + 1
    if begin < len(tokens):
        model_input.chunks.add(tokens=encode_tokens(tokens[begin:]))
    return Prompt(tuple(tokens), model_input)
