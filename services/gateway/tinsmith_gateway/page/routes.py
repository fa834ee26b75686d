"""The routes of the page: `/` and its files, and `/page/api/...` that they read."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tinsmith_gateway.access.permissions import access_of
from tinsmith_gateway.endpoint import Call, Handler, endpoint
from tinsmith_gateway.openai.streaming import begin_stream
from tinsmith_gateway.openai.tokenizers import TokenizerStore
from tinsmith_gateway.page.encoding import Json, render_error
from tinsmith_gateway.page.live import watch
from tinsmith_gateway.page.resources import Ask, Resources
from tinsmith_gateway.page.static_files import static_routes
from tinsmith_gateway.services import Services

_API = "/page/api"
_BODY_BYTES = 2**10
_TOKENIZER_BYTES = 64 * 2**20
"""What is kept for showing tokens."""


def routes(services: Services) -> list[BaseRoute]:
    """Return the routes of the page."""
    tokenizers = TokenizerStore(services.upstream, services.confined, max_bytes=_TOKENIZER_BYTES)
    resources = Resources(services.upstream, tokenizers)
    reads: Mapping[str, Callable[..., Awaitable[Json]]] = {
        "/me": resources.me,
        **{f"/{name}": read for name, read in resources.lists.items()},
        "/runs/{run}": resources.run,
        "/runs/{run}/curves": resources.curves,
        "/runs/{run}/checkpoints": resources.run_checkpoints,
        "/jobs/{job}": resources.job,
        "/episodes/{episode}": resources.episode,
        "/matches/{match}": resources.match,
    }
    routes = [_route(services, path, _answering(read)) for path, read in reads.items()]

    async def page_events(call: Call) -> Response:
        ask = _ask(call)
        return await begin_stream(call, watch(resources, ask, services.drain), ends_with_done=False)

    events = _route(services, "/events", page_events, is_wait=True)
    return [events, *routes, *static_routes()]


def _route(services: Services, path: str, handler: Handler, *, is_wait: bool = False) -> Route:
    serve = endpoint(
        services,
        handler,
        render_error,
        access=access_of("GET", _API + path),
        is_wait=is_wait,
        max_body_bytes=_BODY_BYTES,
    )
    return Route(_API + path, _private(serve), methods=["GET"])


def _answering(read: Callable[..., Awaitable[Json]]) -> Handler:
    async def answer(call: Call) -> Response:
        return JSONResponse(await read(_ask(call), **call.request.path_params))

    # Metrics carry the name of the handler.
    answer.__name__ = f"page_{read.__name__.strip('_')}"
    return answer


def _ask(call: Call) -> Ask:
    call.credential.require_user()
    parameters = call.request.query_params
    query = {name: tuple(parameters.getlist(name)) for name in parameters}
    return Ask(call.credential, query)


def _private(
    serve: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Keep answers out of caches: they are of one reader."""

    @functools.wraps(serve)
    async def answer(request: Request) -> Response:
        response = await serve(request)
        response.headers["cache-control"] = "no-store"
        response.headers["x-content-type-options"] = "nosniff"
        return response

    return answer
