"""OpenAI's API: models, chat completions, completions, responses; for the `openai` package.

What a request asks for and cannot be held to is refused, never ignored; nothing is added to a
prompt. Extra fields for those who train: `return_token_ids` gives `token_ids`, `prompt_token_ids`
and `versions` on each choice, exactly as they were sampled and recorded; see `bodies` for others.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tinsmith_gateway.access.permissions import access_of
from tinsmith_gateway.endpoint import Call, endpoint
from tinsmith_gateway.openai.chat import chat_completion
from tinsmith_gateway.openai.completions import completion
from tinsmith_gateway.openai.errors import lacks_prefix, not_found, owns, render_error, wrong_method
from tinsmith_gateway.openai.model_calls import ModelCalls
from tinsmith_gateway.openai.models import ModelList
from tinsmith_gateway.openai.requests import identified
from tinsmith_gateway.openai.responses import response
from tinsmith_gateway.openai.tokens import detokenize, tokenize
from tinsmith_gateway.services import Services

__all__ = ["lacks_prefix", "not_found", "owns", "routes", "wrong_method"]


def routes(services: Services, calls: ModelCalls) -> list[BaseRoute]:
    """Return the routes below `/v1`.

    Args:
        services: The parts of the gateway.
        calls: Sample, for this protocol and others alike.
    """
    models = ModelList(services, calls)

    def route(path: str, method: str, handler: Callable[[Call], Awaitable[Response]]) -> Route:
        serve = endpoint(
            services,
            handler,
            render_error,
            access=access_of(method, path),
            max_body_bytes=services.config.max_text_body_bytes,
        )
        return Route(path, identified(serve), methods=[method])

    @functools.wraps(tokenize)
    async def tokenize_here(call: Call) -> Response:
        return await tokenize(calls, models, call)

    return [
        route("/v1/models", "GET", models.list_models),
        route("/v1/models/{id:path}", "GET", models.get_model),
        route("/v1/chat/completions", "POST", _bound(chat_completion, calls)),
        route("/v1/completions", "POST", _bound(completion, calls)),
        route("/v1/responses", "POST", _bound(response, calls)),
        route("/tokenize", "POST", tokenize_here),
        route("/detokenize", "POST", _bound(detokenize, calls)),
    ]


def _bound(
    handler: Callable[[ModelCalls, Call], Awaitable[Response]], calls: ModelCalls
) -> Callable[[Call], Awaitable[Response]]:
    """Return a handler of a call alone, under its own name, which metrics carry."""

    @functools.wraps(handler)
    async def handle(call: Call) -> Response:
        return await handler(calls, call)

    return handle
