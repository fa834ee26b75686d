"""Anthropic's Messages API: answers and counts of tokens; for the `anthropic` package.

A request becomes that of a chat completion, and the answer of one becomes a message: templates,
sampling, streams and records of episodes are those of `tinsmith_gateway.openai`. What a request
asks for and cannot be held to is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from tinsmith_gateway.access.permissions import access_of
from tinsmith_gateway.anthropic.errors import not_found, owns, render_error, wrong_method
from tinsmith_gateway.anthropic.messages import count_tokens, message
from tinsmith_gateway.anthropic.models import get_model, list_models
from tinsmith_gateway.endpoint import Call, endpoint
from tinsmith_gateway.openai.model_calls import ModelCalls
from tinsmith_gateway.openai.models import ModelList
from tinsmith_gateway.openai.requests import identified
from tinsmith_gateway.services import Services

PartT = TypeVar("PartT")

__all__ = ["not_found", "owns", "routes", "wrong_method"]


def routes(services: Services, calls: ModelCalls) -> list[BaseRoute]:
    """Return the routes below `/v1/messages`, and `/v1/models` for clients of this API.

    They come before those of OpenAI, whose list of models has the same path.

    Args:
        services: The parts of the gateway.
        calls: Sample, for this protocol and OpenAI's alike.
    """
    models = ModelList(services, calls)

    def route(
        kind: type[Route],
        method: str,
        path: str,
        handler: Callable[[PartT, Call], Awaitable[Response]],
        part: PartT,
    ) -> Route:
        @functools.wraps(handler)
        async def handle(call: Call) -> Response:
            return await handler(part, call)

        serve = endpoint(
            services,
            handle,
            render_error,
            access=access_of(method, path),
            max_body_bytes=services.config.max_text_body_bytes,
        )
        return kind(path, identified(serve), methods=[method])

    return [
        route(Route, "POST", "/v1/messages", message, calls),
        route(Route, "POST", "/v1/messages/count_tokens", count_tokens, calls),
        route(_VersionedRoute, "GET", "/v1/models", list_models, models),
        route(_VersionedRoute, "GET", "/v1/models/{id:path}", get_model, models),
    ]


class _VersionedRoute(Route):
    """A route of requests that name a version of Anthropic's API; others look further."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether a request is for this route."""
        if "anthropic-version" not in Headers(scope=scope):
            return Match.NONE, {}
        return super().matches(scope)
