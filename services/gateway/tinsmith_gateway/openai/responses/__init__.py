"""`POST /v1/responses`: the same samples as a chat completion, in the form of the Responses API.

A request becomes that of a chat completion, and the answer of one becomes a response. Nothing is
kept on the server, so whatever refers to an earlier response is refused by name.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response

from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.openai.chat import ChatCompletion
from tinsmith_gateway.openai.model_calls import ModelCalls
from tinsmith_gateway.openai.responses.bodies import ResponsesBody
from tinsmith_gateway.openai.responses.encoding import Head, whole_response
from tinsmith_gateway.openai.responses.events import response_events
from tinsmith_gateway.openai.streaming import begin_stream, until_disconnect

__all__ = ["response"]


async def response(calls: ModelCalls, call: Call) -> Response:
    """Answer what a response was asked for."""
    body = await call.parse(ResponsesBody)
    chat = body.to_chat()
    chat.check_offered()

    def events(it: Call) -> AsyncGenerator[dict[str, Any]]:
        completion = ChatCompletion(calls, it, chat)
        return response_events(_head(completion, body), completion.chunks())

    if body.stream:
        return await begin_stream(call, events, ends_with_done=False)
    completion = ChatCompletion(calls, call, chat)
    answer = await until_disconnect(call.request, completion.whole())
    return JSONResponse(whole_response(_head(completion, body), answer))


def _head(completion: ChatCompletion, body: ResponsesBody) -> Head:
    return Head(id=completion.id, model=completion.model, created_at=time.time(), body=body)
