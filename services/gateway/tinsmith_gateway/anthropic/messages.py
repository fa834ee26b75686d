"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

from tinsmith_gateway.anthropic.bodies import CountBody, MessagesBody
from tinsmith_gateway.anthropic.encoding import whole_message
from tinsmith_gateway.anthropic.events import message_events
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.openai.chat import ChatCompletion
from tinsmith_gateway.openai.model_calls import ModelCalls
from tinsmith_gateway.openai.streaming import begin_stream, until_disconnect
from tinsmith_runtime.errors import InvalidFieldError

ResultT = TypeVar("ResultT")

_NUMBERED = re.compile(r"\bmessages\.(\d+)")


async def message(calls: ModelCalls, call: Call) -> Response:
    """Answer a conversation."""
    body = await call.parse(MessagesBody)
    completion, origins = _completion(calls, call, body)
    if body.stream:
        events = _renumbered_events(message_events(completion), origins)
        return await begin_stream(call, events, completion.answered_by, ends_with_done=False)
    answer = await until_disconnect(call.request, _renumbered(completion.whole(), origins))
    content = whole_message(completion.id, completion.model, answer, completion.stop_string)
    return JSONResponse(content, headers=completion.answered_by.headers)


async def count_tokens(calls: ModelCalls, call: Call) -> Response:
    """Answer how many tokens the prompt of a conversation has; nothing is drawn."""
    completion, origins = _completion(calls, call, await call.parse(CountBody))
    await until_disconnect(call.request, _renumbered(completion.prepare(), origins))
    return JSONResponse({"input_tokens": completion.num_prompt})


def _completion(
    calls: ModelCalls, call: Call, body: CountBody
) -> tuple[ChatCompletion, Sequence[str]]:
    """Return the chat completion of a request, and what its messages are called there."""
    conversation = body.conversation()
    chat = body.to_chat(conversation)
    chat.check_offered()
    # The input of a call is an object there, which half of its text is not.
    return ChatCompletion(calls, call, chat, shows_cut_calls=False), conversation.origins


async def _renumbered(work: Awaitable[ResultT], origins: Sequence[str]) -> ResultT:
    """Return what the work returns; an error names messages as the request does.

    Raises:
        InvalidFieldError: What the work refuses.
    """
    try:
        return await work
    except InvalidFieldError as error:
        raise _in_words_of_the_request(error, origins) from error


async def _renumbered_events(
    events: AsyncGenerator[dict[str, Any]], origins: Sequence[str]
) -> AsyncGenerator[dict[str, Any]]:
    try:
        async for event in events:
            yield event
    except InvalidFieldError as error:
        raise _in_words_of_the_request(error, origins) from error
    finally:
        await events.aclose()


def _in_words_of_the_request(error: InvalidFieldError, origins: Sequence[str]) -> InvalidFieldError:
    def origin(match: re.Match[str]) -> str:
        index = int(match[1])
        return origins[index] if index < len(origins) else match[0]

    violation = error.field_violations[0]
    return InvalidFieldError(
        _NUMBERED.sub(origin, violation.field), _NUMBERED.sub(origin, violation.description)
    )
