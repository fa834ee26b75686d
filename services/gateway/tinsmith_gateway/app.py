"""The HTTP application: the routes of every protocol, beside each other.

/api/v1/...                        the wire of the `tinker` SDK
/v1/models, /v1/chat/...           OpenAI
/v1/messages, ...                  Anthropic
/claim_episode, /end_episode, ...  episodes, as AgentJet's clients spell them
/, /page/...                       the page for people
/health, /healthz                  whether the process serves
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tinsmith_gateway import anthropic, episodes, openai, page
from tinsmith_gateway.openai.answered_by import CHOICE_HEADER, SAMPLER_HEADER
from tinsmith_gateway.openai.model_calls import ModelCalls
from tinsmith_gateway.services import Services
from tinsmith_gateway.serving.http_spans import HttpSpans
from tinsmith_gateway.tinker import TinkerWire


def create_app(services: Services, tinker: TinkerWire) -> Starlette:
    """Return the application of a gateway."""
    routes: list[BaseRoute] = [
        Route("/healthz", _healthz, methods=["GET"]),
        # Where load balancers and clients of other servers of models look.
        Route("/health", _healthz, methods=["GET"]),
        Route("/api/v1/healthz", _healthz, methods=["GET"]),
    ]
    routes += tinker.routes()
    calls = ModelCalls(services)
    routes += anthropic.routes(services, calls)
    routes += openai.routes(services, calls)
    routes += episodes.routes(services)
    routes += page.routes(services)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(HttpSpans), *_cors(services.config.origins())],
        exception_handlers={404: _not_found, 405: _wrong_method},
    )
    # A redirect would lead wherever the Host header of a request says.
    app.router.redirect_slashes = False
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Return what lets pages of other origins read answers; nothing without an origin."""
    if not origins:
        return []
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[
            "x-request-id",
            "retry-after",
            "retry-after-ms",
            SAMPLER_HEADER,
            CHOICE_HEADER,
        ],
    )
    return [cors]


async def _healthz(request: Request) -> Response:
    del request
    return JSONResponse({"status": "ok"})


async def _not_found(request: Request, error: Exception) -> Response:
    del error
    if anthropic.owns(request.url.path):
        return anthropic.not_found(request)
    if openai.owns(request.url.path) or openai.lacks_prefix(request.url.path):
        return openai.not_found(request)
    message = f"{request.method} {request.url.path} is not part of any protocol served here"
    return JSONResponse({"error": message, "detail": message}, status_code=404)


async def _wrong_method(request: Request, error: Exception) -> Response:
    # Starlette names the methods that there are.
    headers = dict(getattr(error, "headers", None) or {})
    if anthropic.owns(request.url.path):
        return anthropic.wrong_method(request, headers)
    if openai.owns(request.url.path):
        return openai.wrong_method(request, headers)
    message = f"{request.url.path} does not take {request.method}"
    return JSONResponse({"error": message, "detail": message}, status_code=405, headers=headers)
