"""Anthropic's Messages API: answers and counts of tokens; for the `anthropic` package.

A request becomes that of a chat completion, and the answer of one becomes a message: templates,
sampling, streams and records of episodes are those of `tinsmith_gateway.openai`. What a request
asks for and cannot be held to is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tinsmith_gateway.access.permissions import access_of
from tinsmith_gateway.anthropic.errors import not_found, owns, render_error, wrong_method
from tinsmith_gateway.anthropic.messages import count_tokens, message
from tinsmith_gateway.endpoint import Call, endpoint
from tinsmith_gateway.openai.model_calls import ModelCalls
from tinsmith_gateway.openai.requests import identified
from tinsmith_gateway.services import Services

__all__ = ["not_found", "owns", "routes", "wrong_method"]


def routes(services: Services, calls: ModelCalls) -> list[BaseRoute]:
    """Return the routes below `/v1/messages`.

    Args:
        services: The parts of the gateway.
        calls: Sample, for this protocol and OpenAI's alike.
    """

    def route(path: str, handler: Callable[[ModelCalls, Call], Awaitable[Response]]) -> Route:
        @functools.wraps(handler)
        async def handle(call: Call) -> Response:
            return await handler(calls, call)

        serve = endpoint(
            services,
            handle,
            render_error,
            access=access_of("POST", path),
            max_body_bytes=services.config.max_text_body_bytes,
        )
        return Route(path, identified(serve), methods=["POST"])

    return [
        route("/v1/messages", message),
        route("/v1/messages/count_tokens", count_tokens),
    ]
