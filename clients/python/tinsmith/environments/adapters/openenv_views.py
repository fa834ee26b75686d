"""Observations of OpenEnv, raw or typed, as text, and answers of its tools."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.environments.adapters.shown import as_observation
from tinsmith.environments.environment import Content, Observation
from tinsmith.environments.plain_values import to_plain
from tinsmith.images import ImageChunk

_BESIDE = ("done", "reward", "metadata")
"""Fields of each observation that are no part of what is seen."""
_IMAGE_FORMATS = {"image/png": "png", "image/jpeg": "jpeg"}


def fields_of(observation: Any) -> dict[str, Any]:
    """Return the fields of an observation."""
    if isinstance(observation, Mapping):
        return dict(observation)
    if hasattr(observation, "model_dump"):
        return dict(observation.model_dump())
    return dict(vars(observation))


def show(observation: Any) -> str:
    """Return an observation as text: its fields, or its metadata where it has no others."""
    if isinstance(observation, str):
        return observation
    fields = fields_of(observation)
    seen = {name: value for name, value in fields.items() if name not in _BESIDE}
    seen = {name: value for name, value in seen.items() if value not in (None, "", [], {})}
    if not seen:
        seen = dict(fields.get("metadata") or {})
    if len(seen) == 1:
        return _text(*seen.values())
    return "\n".join(f"{name}: {_text(value)}" for name, value in seen.items())


def show_answer(observation: Any) -> tuple[Content, Sequence[ImageChunk]]:
    """Return what a tool answered, and its images."""
    fields = fields_of(observation)
    error = fields.get("error")
    if error:
        return f"error: {error['message'] if isinstance(error, Mapping) else error}", ()
    result: Any = fields.get("result")
    if hasattr(result, "model_dump"):
        result = result.model_dump()
    if not isinstance(result, Mapping) or not isinstance(result.get("content"), list):
        return _text(result), ()
    parts: list[dict[str, str]] = []
    images = []
    for block in result["content"]:
        image = _image(block)
        if image is not None:
            images.append(image)
            parts.append({"type": "image"})
        elif block.get("type") == "text":
            parts.append({"type": "text", "text": str(block.get("text"))})
        else:
            parts.append({"type": "text", "text": _text(block)})
    if images:
        return parts, images
    if not parts:
        return _text(result.get("data")), ()
    return "\n".join(part["text"] for part in parts), ()


def to_observation(shown: Any, before: str = "") -> Observation:
    """Return what a `render` returned as an observation, behind a text; no text shows nothing."""
    return Observation() if shown == "" and not before else as_observation(shown, before)


def _image(block: Any) -> ImageChunk | None:
    if not isinstance(block, Mapping) or block.get("type") != "image":
        return None
    found = _IMAGE_FORMATS.get(str(block.get("mimeType") or block.get("mime_type")))
    try:
        data = base64.b64decode(str(block.get("data")), validate=True)
    except binascii.Error:
        return None
    return ImageChunk(data, found) if found else None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return json.dumps(to_plain(value), ensure_ascii=False)
