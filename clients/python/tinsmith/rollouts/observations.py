"""What environments show, as messages that a chat template reads and tokens with images among them.

An environment is a stranger: what it shows is checked before a template or a tokenizer sees it, and
limited in size, since both take time by length.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.environments.chat_messages import (
    ObservationError,
    place_images,
    read_chat_message,
    read_chat_tool,
)
from tinsmith.images import (
    MAX_IMAGES,
    MAX_PROMPT_PIXELS,
    ImageError,
    ImageRules,
    served_size,
)
from tinsmith.rollouts.interfaces import ChatTokenizer, Message, Observation, StepOutcome
from tinsmith.rollouts.trajectory import PlacedImage
from tinsmith.types import ImageChunk

MAX_TOOLS = 128
_TOKEN_BYTES = 4
MAX_REWARD = 1e9
"""Largest size of a reward: sums and squares of such ones are still numbers of 32 bits."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """Tokens, and the images among them."""

    tokens: tuple[int, ...]
    """Placeholders of images included."""
    images: tuple[PlacedImage, ...] = ()
    """In reading order."""


@dataclass(frozen=True, slots=True)
class ChatObservation:
    """An observation that was checked."""

    messages: tuple[dict[str, Any], ...]
    images: tuple[ImageChunk, ...]


def shape(
    messages: Sequence[Message], images: Sequence[ImageChunk], tokenizer: ChatTokenizer
) -> ChatObservation:
    """Return messages as a template reads them.

    Raises:
        ObservationError: If they are no messages, or hold more or fewer places than images.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ObservationError(f"messages are a list, got {type(messages).__name__}")
    read = [read_chat_message(message) for message in messages]
    place_images(read, len(images))
    if images and tokenizer.image_token_id is None:
        raise ObservationError("a message has a place for an image, and the template reads none")
    return ChatObservation(tuple(read), tuple(images))


def check_images(images: Sequence[ImageChunk]) -> None:
    """Refuse more images, or larger ones, than a prompt may hold; reads their headers alone.

    Raises:
        ObservationError: If they are too many, or one is none.
    """
    if len(images) > MAX_IMAGES:
        raise ObservationError(
            f"the episode shows {len(images)} images, at most {MAX_IMAGES} may be"
        )
    try:
        sizes = [served_size(image.data, image.format) for image in images]
    except ImageError as error:
        raise ObservationError(str(error)) from error
    if sum(width * height for width, height in sizes) > MAX_PROMPT_PIXELS:
        raise ObservationError(
            f"the images of the episode have over {MAX_PROMPT_PIXELS} pixels together"
        )


def check_observation(observation: Observation, tokens: Sequence[int], *, max_bytes: int) -> int:
    """Refuse an observation that is too large, shows nothing, or holds what is no image.

    Args:
        observation: What is shown.
        tokens: Those that it shows, as `read_tokens` returned them.
        max_bytes: Of text, tokens and encoded images.

    Returns:
        About how many bytes of text and tokens it holds.

    Raises:
        ObservationError: If it is so.
    """
    if not (observation.messages or tokens):
        raise ObservationError("the episode goes on, and the environment shows no message")
    num_text_bytes = _count_bytes(observation.messages, max_bytes) + _TOKEN_BYTES * len(tokens)
    num_bytes = num_text_bytes
    for image in observation.images:
        if not isinstance(image, ImageChunk) or not isinstance(image.data, bytes):
            raise ObservationError(f"an image is an ImageChunk, got {type(image).__name__}")
        num_bytes += len(image.data)
    if num_bytes > max_bytes:
        raise ObservationError(f"the observation has over {max_bytes} bytes")
    return num_text_bytes


def read_tools(tools: Sequence[object]) -> list[dict[str, Any]]:
    """Return the schemas of an episode's tools.

    Raises:
        ObservationError: If one is none, or there are too many.
    """
    if len(tools) > MAX_TOOLS:
        raise ObservationError(
            f"the environment has {len(tools)} tools, at most {MAX_TOOLS} may be"
        )
    return [read_chat_tool(tool) for tool in tools]


def check_outcome(outcome: StepOutcome) -> None:
    """Refuse the outcome of a step whose reward, `done` or `info` are none.

    Raises:
        ObservationError: If it is so.
    """
    reward, done, info = outcome.reward, outcome.done, outcome.info
    if not isinstance(reward, numbers.Real | np.bool_) or not abs(reward) <= MAX_REWARD:
        raise ObservationError(
            f"the reward is {_shown(reward)}; it must be a number from -{MAX_REWARD:g} to "
            f"{MAX_REWARD:g}"
        )
    if not isinstance(done, bool | np.bool_):
        raise ObservationError(f"done is {_shown(done)}; it must be True or False")
    if not isinstance(info, Mapping):
        raise ObservationError(f"info is a mapping, got {type(info).__name__}")


def place_among_tokens(
    tokens: Sequence[int], place: int | None, images: Sequence[ImageChunk], rules: ImageRules
) -> TokenPiece:
    """Return tokens with as many placeholders for each image as it takes.

    Args:
        tokens: With one token `place` for each image.
        place: The token that the template writes for an image.
        images: In the order of their places.
        rules: How the model turns images into tokens.

    Raises:
        ObservationError: If there are more or fewer places than images, or an image is none.
    """
    num_places = sum(token == place for token in tokens)
    if num_places != len(images):
        raise ObservationError(
            f"the observation holds {len(images)} images, and its text {num_places} places for "
            "them; a text must not hold the placeholder of an image"
        )
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    for token in tokens:
        if token != place:
            expanded.append(token)
            continue
        image = images[len(placed)]
        try:
            num_tokens = rules.num_tokens(image.data, image.format)
        except ImageError as error:
            raise ObservationError(str(error)) from error
        chunk = dataclasses.replace(image, expected_tokens=num_tokens)
        placed.append(PlacedImage(len(expanded), num_tokens, chunk))
        expanded += [rules.token_id] * num_tokens
    return TokenPiece(tuple(expanded), tuple(placed))


def _shown(value: object) -> str:
    try:
        return repr(value)[:64]
    except Exception:
        # An integer of many thousand digits has no text, and a stranger's class may fail.
        return f"a {type(value).__name__} that cannot be shown"


def _count_bytes(value: object, limit: int) -> int:
    """Return about how many bytes of text a value holds; stops above the limit."""
    num_bytes = 0
    stack = [value]
    while stack and num_bytes <= limit:
        item = stack.pop()
        num_bytes += 1
        if isinstance(item, str | bytes):
            num_bytes += len(item)
        elif isinstance(item, Mapping):
            stack += [*item, *item.values()]
        elif isinstance(item, Sequence):
            num_bytes += len(item)
            stack += item[:limit]
    return num_bytes
