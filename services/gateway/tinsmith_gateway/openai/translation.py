"""What other protocols have in common that are answered by chat completions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Protocol

import pydantic

from tinsmith_gateway.endpoint import refusal_of
from tinsmith_gateway.openai.bodies import ChatBody
from tinsmith_gateway.openai.unused_fields import check_unused
from tinsmith_runtime.errors import InvalidFieldError, TinsmithError, internal_error

logger = logging.getLogger(__name__)

Event = dict[str, Any]

SAME_FIELDS = frozenset(
    {
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "seed",
    }
)
"""Fields that mean the same in a chat completion, beyond those of any protocol."""


def check_offered(
    extra: Mapping[str, Any],
    *,
    reasons: Mapping[str, str],
    neutral: Mapping[str, tuple[Any, ...]],
    passed: frozenset[str],
) -> None:
    """Refuse a field that a body does not declare, unless it asks for nothing or is passed on.

    Args:
        extra: What was sent beside the fields of the body.
        reasons: Why a field is not offered, by its name, which is one of `neutral`.
        neutral: Values that ask for nothing, by name.
        passed: Names that are looked at elsewhere.

    Raises:
        InvalidFieldError: Names the first.
    """
    for name, reason in reasons.items():
        if extra.get(name) not in neutral[name]:
            raise InvalidFieldError(name, reason)
    check_unused({name: value for name, value in extra.items() if name not in passed}, also=neutral)


def chat_of(fields: Mapping[str, Any]) -> ChatBody:
    """Return the body of a chat completion.

    Raises:
        InvalidFieldError: Names the first field that is wrong.
    """
    try:
        return ChatBody.model_validate(fields)
    except pydantic.ValidationError as error:
        raise refusal_of(error) from error


class EventWriter(Protocol):
    """Writes the chunks of a chat completion as the events of a protocol."""

    def begin(self) -> Iterable[Event]:
        """Return what comes before anything of the answer."""
        ...

    def push(self, chunk: Mapping[str, Any]) -> Iterable[Event]:
        """Return what a chunk brings."""
        ...

    def fail(self, error: TinsmithError) -> Event:
        """Return the end of an answer that failed."""
        ...


async def write_events(
    writer: EventWriter, chunks: AsyncGenerator[dict[str, Any]]
) -> AsyncGenerator[Event]:
    """Yield the events of a chat completion; one that fails amid them ends with its failure.

    Args:
        writer: Of the protocol.
        chunks: Of the chat completion, with its usage at the end.

    Raises:
        TinsmithError: What the completion failed with before its first chunk.
    """
    has_begun = False
    async with contextlib.aclosing(chunks):
        try:
            async for chunk in chunks:
                if not has_begun:
                    has_begun = True
                    for event in writer.begin():
                        yield event
                for event in writer.push(chunk):
                    yield event
        except TinsmithError as error:
            if not has_begun:
                raise
            logger.info("stream failed", extra={"reason": error.reason})
            yield writer.fail(error)
        except Exception:
            if not has_begun:
                raise
            logger.exception("stream failed by a bug")
            yield writer.fail(internal_error())
