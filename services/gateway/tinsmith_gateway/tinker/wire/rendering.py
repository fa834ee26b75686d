"""Answers of the Tinker wire: errors, futures and what became of them.

An error of the user becomes a failed future or a 4xx with a body. It is never a 5xx, which the SDK
would retry for minutes.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from tinsmith_runtime.errors import ErrorCode, TinsmithError

PROTOBUF = "application/x-protobuf"

_SERVER_CODES = frozenset(
    {ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE, ErrorCode.DATA_LOSS, ErrorCode.DEADLINE_EXCEEDED}
)


def render_error(error: TinsmithError, status: int, headers: dict[str, str]) -> Response:
    """Return an error as an HTTP answer; it always has a body."""
    content = {
        "error": error.message,
        "detail": error.message,
        "reason": error.reason,
        "category": category_of(error),
    }
    return JSONResponse(content, status_code=status, headers=headers)


def category_of(error: TinsmithError) -> str:
    """Return whose mistake an error is: `user` or `server`."""
    return "server" if error.code in _SERVER_CODES else "user"


def failed(error: TinsmithError) -> Response:
    """Return a future that failed: HTTP 200, as the SDK wants it."""
    return JSONResponse(
        {
            "error": f"{error.message} ({error.reason})",
            "category": category_of(error),
        }
    )


def future(request_id: str, model_id: str = "", **more: Any) -> Response:
    """Return a future that was accepted."""
    content: dict[str, Any] = {"request_id": request_id, **more}
    if model_id:
        content["model_id"] = model_id
    return JSONResponse(content)


def try_again(request_id: str, *, waiting_for: str, is_queued: bool) -> Response:
    """Return that a future is pending, and why: HTTP 408, at which the SDK asks again at once.

    Args:
        request_id: The future.
        waiting_for: What it waits for, in words; shown to the user if `is_queued`.
        is_queued: Whether something else stands in its way.
    """
    content: dict[str, Any] = {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "paused_capacity" if is_queued and waiting_for else "active",
    }
    if waiting_for:
        content["queue_state_reason"] = waiting_for
    return JSONResponse(content, status_code=408)


def metadata_only(num_bytes: int) -> Response:
    """Return how large a finished result is, for a client that reserves memory first."""
    return JSONResponse({"status": "complete_metadata", "response_payload_size": num_bytes})


def protobuf(body: bytes) -> Response:
    """Return a result as protobuf."""
    return Response(body, media_type=PROTOBUF)


def gone(message: str) -> Response:
    """Return that a future is gone for good: HTTP 410, at which the SDK samples anew."""
    return JSONResponse({"error": message, "detail": message}, status_code=410)
