"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

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
    "QUEUE_FULL": "rate_limit_exceeded",
    "RATE_LIMITED": "rate_limit_exceeded",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_FIRST_SERVER_STATUS = 500


def encode_error(error: TinsmithError, status: int) -> dict[str, Any]:
    """Return the body of an error; `code` is OpenAI's where it has one, else Tinsmith's reason."""
    default = "invalid_request_error" if status < _FIRST_SERVER_STATUS else "server_error"
    field = error.metadata.get("field")
    if field is None and error.violations:
        field = error.violations[0].field
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(status, default),
            "param": field if error.code is ErrorCode.INVALID_ARGUMENT else None,
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


def render_error(error: TinsmithError, status: int, headers: dict[str, str]) -> Response:
    """Return the answer of an error."""
    return JSONResponse(encode_error(error, status), status_code=status, headers=headers)
