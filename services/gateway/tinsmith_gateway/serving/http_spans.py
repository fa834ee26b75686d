"""Requests over HTTP as spans: where traces of other clients than the SDK begin or go on.

Only what does something is one: a request that reads or waits, again and again, would fill a trace.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.tracing import spans

_SERVICE = "gateway"
_STANDING = ("/retrieve_future", "/session_heartbeat", "/heartbeat_episode", "/telemetry")
_SERVER_ERROR = 500


class HttpSpans:
    """Wraps an application so that its requests are spans, while traces are on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if not spans.is_on() or not _is_traced(scope):
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        above = spans.received(headers)
        spans.bind_service(_SERVICE)
        span = spans.begin(
            f"{scope['method']} {scope['path']}",
            kind="server",
            parent=above,
            is_root=above is None,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        )
        status = 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        problem = "cut off"
        try:
            with span.within():
                await self._app(scope, receive, note_status)
            problem = str(status) if status >= _SERVER_ERROR else ""
        finally:
            span.set({"http.response.status_code": status})
            span.end(problem=problem)


def _is_traced(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and not scope["path"].endswith(_STANDING)
    )
