"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tinsmith_gateway.openai.errors import told_once
from tinsmith_runtime.errors import TinsmithError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FIRST_SERVER_STATUS = 500
_PREFIX = "/v1/messages"
_TOO_LONG = "SEQUENCE_TOO_LONG"
"""Clients know it by the words of Anthropic's message."""


def encode_error(error: TinsmithError, status: int) -> dict[str, Any]:
    """Return the body of an error."""
    message = error.message
    if error.reason == _TOO_LONG:
        message = f"prompt is too long: {message}"
    return _body(message, _kind(status))


def render_error(error: TinsmithError, status: int, headers: dict[str, str]) -> Response:
    """Return the answer of an error."""
    status, headers = told_once(error, status, headers)
    return JSONResponse(encode_error(error, status), status_code=status, headers=headers)


def owns(path: str) -> bool:
    """Return whether a path is Anthropic's, whose clients look for errors in its form."""
    return path == _PREFIX or path.startswith(f"{_PREFIX}/")


def not_found(request: Request) -> Response:
    """Return the answer to a path that is not served."""
    message = (
        f"{request.method} {request.url.path} is not served here; served are /v1/messages and "
        "/v1/messages/count_tokens, and nothing is kept on the server"
    )
    return JSONResponse(_body(message, _kind(404)), status_code=404)


def wrong_method(request: Request, headers: dict[str, str]) -> Response:
    """Return the answer to a method that a path does not take; `headers` name those it takes."""
    message = f"{request.url.path} does not take {request.method}"
    return JSONResponse(_body(message, _kind(405)), status_code=405, headers=headers)


def _kind(status: int) -> str:
    default = "invalid_request_error" if status < _FIRST_SERVER_STATUS else "api_error"
    return _TYPES.get(status, default)


def _body(message: str, kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}
