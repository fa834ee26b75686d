"""Fields of requests that are taken and change no token, beside those that a body declares.

A field is harmless whatever it says, or harmless by some of its values. Any other is refused by
name, so that a sample is never taken for what it is not. `docs/openai.md` lists both tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith_runtime.errors import InvalidFieldError

HARMLESS_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""Name the user of a client, or say how work is billed or cached."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_grammar": (None,),
    "length_penalty": (None, 1),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False, True),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Each with the values that ask for nothing that changes a token; nothing is ever stored."""


def check_unused(
    fields: Mapping[str, Any] | None, *, also: Mapping[str, tuple[Any, ...]] | None = None
) -> None:
    """Refuse a field that no body declares and that is not harmless.

    Args:
        fields: Names and values that a body was sent beside those it declares.
        also: Further values that ask for nothing, by name.

    Raises:
        InvalidFieldError: Names the first.
    """
    neutral_values = {**NEUTRAL_VALUES, **(also or {})}
    for name, value in (fields or {}).items():
        if name in HARMLESS_FIELDS:
            continue
        neutral = neutral_values.get(name)
        if neutral is None:
            raise InvalidFieldError(name, "is not known here; leave it out")
        if not any(value == one and type(value) in _types_like(one) for one in neutral):
            raise InvalidFieldError(name, "is not offered; leave it out")


def _types_like(value: object) -> tuple[type, ...]:
    """Return the types that JSON may give a value in; true is no number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (int, float) if is_number else (type(value),)
