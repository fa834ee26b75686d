"""What a request is known by.

Samples are drawn at least once. A request that is sent again is drawn again, with the same tokens
if it has a seed and the weights are the same. With an `Idempotency-Key` header it is the same call:
its id, and its seed unless it has one, are derived from the caller's key and that header. So a
repetition repeats the tokens and is recorded once in an episode. OpenAI's own clients send the
header only when told to. `x-stainless-retry-count` does not name the repeated request and is
ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from tinsmith_gateway.endpoint import Call
from tinsmith_runtime.observability.logs import bind_log_fields

_NAMESPACE = uuid.UUID("0c6f3a52-7f0e-5b6d-9a43-2f6f4c1a9d10")

Endpoint = Callable[[Request], Awaitable[Response]]


def call_id_of(call: Call) -> uuid.UUID:
    """Return the id of a model call: that of its idempotency key, else a new one."""
    key = call.request.headers.get("idempotency-key")
    if not key:
        return uuid.uuid4()
    caller = call.credential.caller
    attempt = call.credential.key if call.credential.episode is not None else caller.key_id
    path = call.request.url.path
    return uuid.uuid5(_NAMESPACE, "\0".join((caller.project, attempt, path, key)))


def identified(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint whose answers and log lines carry a request id."""

    async def serve(request: Request) -> Response:
        request_id = f"req_{uuid.uuid4().hex}"
        bind_log_fields(request_id=request_id)
        response = await endpoint(request)
        # The second is where Anthropic's clients look.
        response.headers["x-request-id"] = response.headers["request-id"] = request_id
        return response

    return serve
