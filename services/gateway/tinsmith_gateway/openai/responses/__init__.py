"""`POST /v1/responses`: the same samples as a chat completion, in the form of the Responses API.

A request becomes that of a chat completion, and the answer of one becomes a response. Nothing is
kept on the server, so whatever refers to an earlier response is refused by name.
"""

from __future__ import annotations

import time

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

    completion = ChatCompletion(calls, call, chat)
    if body.stream:
        events = response_events(_head(completion, body), completion.chunks())
        return await begin_stream(call, events, completion.answered_by, ends_with_done=False)
    answer = await until_disconnect(call.request, completion.whole())
    content = whole_response(_head(completion, body), answer)
    return JSONResponse(content, headers=completion.answered_by.headers)


def _head(completion: ChatCompletion, body: ResponsesBody) -> Head:
    return Head(id=completion.id, model=completion.model, created_at=time.time(), body=body)
