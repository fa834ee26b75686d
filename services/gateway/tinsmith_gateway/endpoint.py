"""What is the same for every HTTP request: body, caller, errors.

Each protocol renders errors in its own form; the status codes are chosen once, here. They follow
what clients do with them: the `tinker` SDK and the `openai` package send a request again on 408,
409, 429 and 5xx, so a user's mistake is none of these.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic
import pydantic_core
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.metrics import HTTP_ERRORS, HTTP_SECONDS
from tinsmith_gateway.services import Services
from tinsmith_runtime import json_parts
from tinsmith_runtime.errors import (
    BatchTooLargeError,
    ErrorCode,
    InvalidFieldError,
    MalformedRequestError,
    TinsmithError,
    WorkerUnavailableError,
    internal_error,
)
from tinsmith_runtime.observability.logs import bind_log_fields
from tinsmith_runtime.rpc.in_flight import AdmittedRequest
from tinsmith_runtime.rpc.peers import bind_peer, join_address
from tinsmith_runtime.rpc.permissions import Access
from tinsmith_runtime.tenant import bind_tenant

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=pydantic.BaseModel)
ResultT = TypeVar("ResultT")

_STATUS = {
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.NOT_FOUND: 404,
    # Not 409, which clients take for a race and send again.
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.FAILED_PRECONDITION: 400,
    ErrorCode.ABORTED: 400,
    ErrorCode.DEADLINE_EXCEEDED: 503,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNIMPLEMENTED: 404,
    ErrorCode.CANCELLED: 500,
    ErrorCode.UNKNOWN: 500,
    ErrorCode.INTERNAL: 500,
    ErrorCode.DATA_LOSS: 500,
}
_TOO_MANY = 429
_PARSED_AT_ONCE_BYTES = 64 * 2**10
MAX_JSON_VALUES = 2**21
"""Commas of a JSON body: the parser lets nothing else run, not even from another thread."""
MAX_JSON_PARTS = 2**17
"""Lists, objects and members of a JSON body, each of which becomes an object here."""
_MAX_READ_MISTAKES = 1000
"""Mistakes of a body that has the first one named: all are read to know it, a kilobyte each."""
_SAID_OF_JSON = {
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "list_type": "Input should be a valid array",
    "none_required": "Input should be null",
}
"""What pydantic says in words of Python, in those of JSON."""
_CLIENT_GONE = 499
_BODY_TIMEOUT = 408


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request whose caller is known.

    Attributes:
        services: What the gateway is made of.
        credential: The caller.
        request: Path, query and headers.
        body: The body, whole.
        admission: Counts the request; tokens are added once they are known.
        excess: Why the body is only the beginning of what was sent; None if it is whole.
    """

    services: Services
    credential: Credential
    request: Request
    body: bytes
    admission: AdmittedRequest
    excess: BatchTooLargeError | None = None

    async def parse(self, model: type[BodyT]) -> BodyT:
        """Return the JSON body as a model; a large one is parsed aside from other requests.

        Raises:
            MalformedRequestError: If it is no JSON object.
            InvalidFieldError: If a field is missing or wrong; it names the first.
        """
        if len(self.body) <= _PARSED_AT_ONCE_BYTES:
            return parse_json(self.body, model)
        return await self.aside(parse_json, self.body, model)

    async def aside(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        """Return what work for the caller returns that takes milliseconds, from a thread."""
        return await self.services.threads.run(self.credential.caller.project, work, *args)


Handler = Callable[[Call], Awaitable[Response]]
RenderError = Callable[[TinsmithError, int, dict[str, str]], Response]


def endpoint(
    services: Services,
    handler: Handler,
    render_error: RenderError,
    *,
    access: Access | None,
    is_wait: bool = False,
    takes_excess: bool = False,
    max_body_bytes: int | None = None,
) -> Callable[[Request], Awaitable[Response]]:
    """Return a Starlette endpoint around a handler.

    Args:
        services: What the gateway is made of.
        handler: Answers a request; a `TinsmithError` that it raises is rendered.
        render_error: Makes the answer of an error, given its status and headers.
        access: The roles whose keys call it; None for a route without a key, whose credential is
            the anonymous one.
        is_wait: Whether it only waits for what goes on anyway, or keeps something alive: it is
            counted apart from other requests, and cut when the gateway shuts down.
        takes_excess: Whether the handler is given the beginning of a body that is too large,
            because it has to count the request; else the request is refused here.
        max_body_bytes: Limit of its body; None for that of the gateway.
    """
    name = handler.__name__
    limit = min(max_body_bytes or services.config.max_body_bytes, services.config.max_body_bytes)

    async def serve(request: Request) -> Response:
        begin_s = time.perf_counter()
        status = 500
        try:
            credential = services.anonymous
            if access is not None:
                bind_peer(_address_of(request))
                credential = await services.callers.authenticate(request.headers)
                if credential.caller.role not in access:
                    raise credential.caller.denied(f"{request.method} {request.url.path}")
                bind_tenant(credential.caller.project)
                bind_log_fields(project=credential.caller.project, key_id=credential.caller.key_id)
            with (
                services.limits.admit(credential.caller.tenant, is_wait=is_wait) as admission,
                services.drain.running(is_wait=is_wait),
            ):
                body, excess = await _read_body(request, limit, services.config, admission)
                if excess is not None and not takes_excess:
                    raise excess
                call = Call(services, credential, request, body, admission, excess)
                response = await handler(call)
            status = response.status_code
        except ClientDisconnect:
            status = _CLIENT_GONE
            response = Response(status_code=_CLIENT_GONE)
        except _BodyTimeoutError:
            status = _BODY_TIMEOUT
            # What may still come of the body is no head of another request.
            response = Response(status_code=_BODY_TIMEOUT, headers={"connection": "close"})
        except TinsmithError as error:
            status = status_of(error)
            HTTP_ERRORS.labels(name, error.reason).inc()
            response = render_error(error, status, retry_headers(error))
        except TimeoutError:
            status = 503
            slow = WorkerUnavailableError(
                "what the request needs lasts too long; send it again", retry_after_s=1.0
            )
            HTTP_ERRORS.labels(name, slow.reason).inc()
            response = render_error(slow, status, retry_headers(slow))
        except Exception:
            logger.exception("request failed by a bug", extra={"endpoint": name})
            HTTP_ERRORS.labels(name, "INTERNAL").inc()
            response = render_error(internal_error(), 500, {})
        finally:
            HTTP_SECONDS.labels(name, str(status)).observe(time.perf_counter() - begin_s)
        return response

    return serve


def status_of(error: TinsmithError) -> int:
    """Return the HTTP status of an error."""
    if error.code is ErrorCode.RESOURCE_EXHAUSTED:
        # Without a delay waiting does not help, and a client must not be told to try again.
        return _TOO_MANY if error.retry_after_s is not None else 400
    return _STATUS[error.code]


def retry_headers(error: TinsmithError) -> dict[str, str]:
    """Return the headers that say when to try again, if trying again may help."""
    if status_of(error) not in (_TOO_MANY, 503):
        return {}
    delay_s = error.retry_after_s or 1.0
    return {
        "retry-after": str(max(math.ceil(delay_s), 1)),
        "retry-after-ms": str(max(int(delay_s * 1000), 1)),
    }


def _check_values(body: bytes) -> None:
    if body.count(b",") > MAX_JSON_VALUES:
        raise BatchTooLargeError(
            f"the body holds more than {MAX_JSON_VALUES} JSON values; send it in parts",
            limit=MAX_JSON_VALUES,
        )
    if json_parts.has_more(body, MAX_JSON_PARTS, json_parts.PARTS):
        raise BatchTooLargeError(
            f"the body holds more than {MAX_JSON_PARTS} JSON lists, objects and members; send it "
            "in parts",
            limit=MAX_JSON_PARTS,
        )


def parse_json(body: bytes, model: type[BodyT]) -> BodyT:
    """Return a JSON body as a model; see `Call.parse` for the errors."""
    if len(body) > _PARSED_AT_ONCE_BYTES:
        _check_values(body)
    try:
        # Mistakes refer to values of Python; those of pydantic's own JSON are copied for each.
        value = pydantic_core.from_json(body, cache_strings="keys")
    except ValueError as error:
        raise MalformedRequestError(f"the body is not JSON: {error}") from error
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        raise refusal_of(error) from error


def refusal_of(error: pydantic.ValidationError) -> MalformedRequestError | InvalidFieldError:
    """Return the refusal of a body by its first mistake."""
    # Many are those of a map: a list ends at its first mistake (`json_lists`).
    if error.error_count() > _MAX_READ_MISTAKES:
        return InvalidFieldError("body", f"has {error.error_count()} values of a wrong kind")
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    return InvalidFieldError(field, _SAID_OF_JSON.get(first["type"], first["msg"]))


def too_large(what: str, limit: int) -> BatchTooLargeError:
    """Return the refusal of a body, or of what it stands for."""
    return BatchTooLargeError(f"{what} is larger than {limit} bytes; send it in parts", limit=limit)


def _address_of(request: Request) -> str:
    return "" if request.client is None else join_address(*request.client)


class _BodyTimeoutError(Exception):
    """The body stopped coming, or comes too slowly."""


async def _read_body(
    request: Request, limit: int, config: GatewayConfig, admission: AdmittedRequest
) -> tuple[bytes, BatchTooLargeError | None]:
    """Return a body, or the beginning of one that is too large.

    Raises:
        _BodyTimeoutError: If it pauses too long, comes too slowly, or takes too long as a whole.
    """
    chunks: list[bytes] = []
    size = 0
    stream = request.stream()
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    while True:
        # A slow beginning is forgiven: the first pause may be as long as any.
        due_s = min(
            loop.time() + config.body_timeout_s,
            begin_s + config.body_timeout_s + size / config.min_body_bytes_per_s,
            begin_s + config.body_deadline_s,
        )
        try:
            async with asyncio.timeout_at(due_s):
                chunk = await anext(stream, None)
        except TimeoutError as error:
            raise _BodyTimeoutError from error
        if chunk is None:
            return b"".join(chunks), None
        size += len(chunk)
        if size > limit:
            return b"".join(chunks), too_large("the body", limit)
        admission.add_bytes(len(chunk))
        chunks.append(chunk)
