"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tinsmith_runtime.errors import ErrorCode, TinsmithError

_CODES = {
    "SEQUENCE_TOO_LONG": "context_length_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
    "RUN_NOT_FOUND": "model_not_found",
    "CHECKPOINT_NOT_FOUND": "model_not_found",
    "CHECKPOINT_EXPIRED": "model_not_found",
    "KEY_MISSING": "invalid_api_key",
    "KEY_INVALID": "invalid_api_key",
    "KEY_REVOKED": "invalid_api_key",
    "KEY_EXPIRED": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
    "RATE_LIMITED": "rate_limit_exceeded",
    "BUDGET_EXCEEDED": "insufficient_quota",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_NO_BUDGET = "BUDGET_EXCEEDED"
_NO_BUDGET_STATUS = 429
_NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients repeat a 429 unless they are told not to."""
_TOO_LONG = "SEQUENCE_TOO_LONG"
"""Libraries know it by the words of OpenAI's message, not by its code."""
_FIRST_SERVER_STATUS = 500
_PREFIX = "/v1"
_REMEDIES = {
    "MODEL_NOT_FOUND": "GET /v1/models lists the names there are",
    "RUN_NOT_FOUND": "GET /v1/models lists the names there are",
    "CHECKPOINT_NOT_FOUND": "GET /v1/models lists the names there are",
    "KEY_INVALID": "send a key of this server, with all its characters",
}
"""What to do, in the words of this API: errors of other pods do not know that they come here."""
_INSTEAD = {
    "/v1/embeddings": "models here are trained to write, and none of them gives embeddings",
    "/v1/responses/": "nothing is kept on the server; POST /v1/responses takes the whole input",
}
_WITHOUT_PREFIX = ("/chat/completions", "/completions", "/responses", "/models", "/embeddings")
_SERVED = (
    "served are /v1/models, /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages"
)


def encode_error(error: TinsmithError, status: int) -> dict[str, Any]:
    """Return the body of an error; `code` is OpenAI's where it has one, else Tinsmith's reason."""
    default = "invalid_request_error" if status < _FIRST_SERVER_STATUS else "server_error"
    field = error.metadata.get("field")
    if field is None and error.field_violations:
        field = error.field_violations[0].field
    remedy = _REMEDIES.get(error.reason)
    is_wrong = error.code is ErrorCode.INVALID_ARGUMENT
    limit = error.metadata.get("max_context_tokens", error.metadata.get("limit"))
    message = f"{error.message}; {remedy}" if remedy else error.message
    if error.reason == _TOO_LONG and limit is not None:
        message = f"This model's maximum context length is {limit} tokens. {message}"
    kind = "insufficient_quota" if error.reason == _NO_BUDGET else _TYPES.get(status, default)
    return _body(
        message,
        kind=kind,
        param=field.removeprefix("params.") if is_wrong and field else None,
        code=_CODES.get(error.reason, error.reason.lower()),
    )


def render_error(error: TinsmithError, status: int, headers: dict[str, str]) -> Response:
    """Return the answer of an error."""
    status, headers = told_once(error, status, headers)
    return JSONResponse(encode_error(error, status), status_code=status, headers=headers)


def told_once(
    error: TinsmithError, status: int, headers: dict[str, str]
) -> tuple[int, dict[str, str]]:
    """Return status and headers of an error; those of a spent budget make no client repeat it."""
    return (_NO_BUDGET_STATUS, _NO_RETRY) if error.reason == _NO_BUDGET else (status, headers)


def owns(path: str) -> bool:
    """Return whether a path is OpenAI's, whose clients look for errors in its form."""
    return path == _PREFIX or path.startswith(f"{_PREFIX}/")


def lacks_prefix(path: str) -> bool:
    """Return whether a path is one of OpenAI's whose client was given a base URL without `/v1`."""
    return path.startswith(_WITHOUT_PREFIX)


def not_found(request: Request) -> Response:
    """Return the answer to a path that is not served."""
    path = request.url.path
    if lacks_prefix(path):
        return _wrong_base(request, "the base URL has to end in /v1")
    if path.startswith(_PREFIX * 2):
        return _wrong_base(request, "the base URL has a /v1 too many")
    instead = next((way for known, way in _INSTEAD.items() if path.startswith(known)), _SERVED)
    message = f"{request.method} {path} is not served here; {instead}"
    body = _body(message, kind="not_found_error", param=None, code="unknown_url")
    return JSONResponse(body, status_code=404)


def wrong_method(request: Request, headers: dict[str, str]) -> Response:
    """Return the answer to a method that a path does not take; `headers` name those it takes."""
    message = f"{request.url.path} does not take {request.method}"
    body = _body(message, kind="invalid_request_error", param=None, code="method_not_allowed")
    return JSONResponse(body, status_code=405, headers=headers)


def _wrong_base(request: Request, remedy: str) -> Response:
    message = f"{request.method} {request.url.path} is not served here; {remedy}"
    body = _body(message, kind="not_found_error", param=None, code="unknown_url")
    return JSONResponse(body, status_code=404)


def _body(message: str, *, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
