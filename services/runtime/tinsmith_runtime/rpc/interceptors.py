"""What happens around every call, in one interceptor: authenticate, count, read, time, map errors.

One interceptor rather than a chain, because the order matters and is easier to read in one place. A
call is refused while the pod drains. Its caller is found by its metadata, and what the caller has
in flight is counted, before a byte of its request is read: every method is served as a stream,
which reads when it is told to. Then its bytes are decoded here: a deserializer that fails inside
gRPC would answer `UNKNOWN`. What the servicer raises becomes a `google.rpc.Status`. This is the
only module that maps domain errors to status codes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from grpc_status import rpc_status

from tinsmith.rpc.error_codec import encode_status
from tinsmith.tracing import spans
from tinsmith_runtime.errors import (
    DrainingError,
    KeyInvalidError,
    MalformedRequestError,
    TinsmithError,
    internal_error,
)
from tinsmith_runtime.observability.logs import bind_log_fields
from tinsmith_runtime.observability.metrics import RPC_ERRORS, RPC_IN_FLIGHT, RPC_SECONDS
from tinsmith_runtime.rpc import health
from tinsmith_runtime.rpc.auth import CHARGED_KEY_HEADER, Authenticator, Caller, bind_caller
from tinsmith_runtime.rpc.body_reading import BodyReader, counted_one_by_one
from tinsmith_runtime.rpc.in_flight import AdmittedRequest, Limits
from tinsmith_runtime.rpc.message_parts import check_request, max_parts_of
from tinsmith_runtime.rpc.peers import address_of, bind_peer
from tinsmith_runtime.rpc.pod_identity import PodIdentity, PodRole
from tinsmith_runtime.rpc.pod_tls import peer_identity
from tinsmith_runtime.rpc.requests import bind_body
from tinsmith_runtime.rpc.server_spans import begin_call, end_call, exemplar_of

logger = logging.getLogger(__name__)

# grpc's classes are generic for the type checker alone.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
CLIENT_GONE = "the client is gone"
"""What a call ends with whose answer cannot be sent: gRPC takes it for a cancelled one."""

Decode = Callable[[bytes], Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of a server.

    Args:
        domain: The `ErrorInfo.domain` of this pod, such as `trainer.tinsmith`.
        authenticator: Finds the caller of each call but health checks.
        limits: Of what is in flight. One key of a pod acts for every project, so that only the
            bounds of all together hold for pods.
        reader: Reads requests.
    """

    def __init__(
        self, *, domain: str, authenticator: Authenticator, limits: Limits, reader: BodyReader
    ) -> None:
        self._domain = domain
        self.pod = domain.partition(".")[0]
        """Name of the pod."""
        self._authenticator = authenticator
        self._limits = limits
        self._reader = reader
        self._is_draining = False

    def drain(self) -> None:
        """Refuse new calls with `UNAVAILABLE` from now on."""
        self._is_draining = True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the handler of a method, wrapped."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(health.PREFIX):
            return handler
        return _Call(self, method).wrap(handler)

    async def authenticate(self, method: str, context: Context) -> Caller:
        """Return the caller of a call that may go on.

        Raises:
            DrainingError: If the pod is shutting down.
            UnauthenticatedError: If the credential is no good.
            RoleMissingError: If the caller's role does not call the method.
            RateLimitedError: If the address has shown too many keys that are unknown.
        """
        if self._is_draining:
            raise DrainingError("the pod is shutting down; send the request again")
        bind_peer(address_of(context.peer()))
        metadata = dict(context.invocation_metadata() or ())
        authorization = metadata.get("authorization")
        caller = await self._authenticator.authenticate(
            authorization if isinstance(authorization, str) else None
        )
        caller.require_method(method)
        _require_peer(caller, context)
        return caller.calls_for(metadata.get(CHARGED_KEY_HEADER))

    def admit(self, caller: Caller) -> AdmittedRequest:
        """Count a call until the context that is returned ends.

        Raises:
            RateLimitedError: If too much is in flight.
        """
        return self._limits.admit(None if caller.is_pod else caller.tenant)

    async def read(
        self,
        bodies: AsyncIterator[bytes],
        context: Context,
        method: str,
        caller: Caller,
        admission: AdmittedRequest,
    ) -> bytes:
        """Return the one request of a call; see `BodyReader.read`."""
        remaining_s = context.time_remaining()
        return await self._reader.read(
            bodies,
            admission,
            method=method,
            project=caller.project,
            timeout_s=math.inf if remaining_s is None else remaining_s,
        )

    async def abort(self, context: Context, method: str, error: Exception) -> NoReturn:
        """End a call with the status of an error; a bug is logged with its trace."""
        told = error_to_tell(error, method)
        RPC_ERRORS.labels(method, told.reason).inc()
        await end_with(context, encode_status(told, domain=self._domain))


def _require_peer(caller: Caller, context: Context) -> None:
    """Refuse a key that comes over the connection of a pod which it is not of.

    Keys of users come through gateways.

    Raises:
        KeyInvalidError: If the certificate of the connection is of another role or namespace.
    """
    peer = peer_identity(context)
    if peer is None:
        return
    role, namespace = peer
    if not caller.is_pod:
        expected, is_own = PodRole.GATEWAY.value, role == PodRole.GATEWAY
    else:
        key = PodIdentity.parse(caller.key_id)
        expected = f"{key.role} of namespace {key.namespace!r}"
        is_own = role == key.role and key.namespace in ("", namespace)
    if not is_own:
        raise KeyInvalidError(
            f"the certificate of the connection is of {role or 'no role'} in {namespace!r}, and "
            f"the key needs that of {expected}"
        )


def error_to_tell(error: Exception, method: str) -> TinsmithError:
    """Return what the caller is told of an error, whose frames it forgets; a bug is logged."""
    told = error if isinstance(error, TinsmithError) else internal_error()
    if told is not error:
        logger.error("call failed by a bug", exc_info=error, extra={"method": method})
    forget_frames(error)
    return told


def forget_frames(error: BaseException) -> None:
    """Let an error forget the frames it has left, and with them the bytes of the request.

    gRPC keeps the error of a refused call in a cycle, until the garbage collector comes. The frames
    themselves are left alone: to clear one ends what is suspended in it. Other calls may wait for
    the same error, as those of one write to the database do.
    """
    left: BaseException | None = error
    while left is not None:
        left.__traceback__ = None
        left = left.__context__


async def end_with(context: Context, status: status_pb2.Status) -> NoReturn:
    """End a call with a status, unless its client is gone."""
    try:
        await context.abort_with_status(rpc_status.to_status(status))
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError(CLIENT_GONE) from error
    raise AssertionError("abort_with_status returned")


class _Call:
    """One method, wrapped for one call."""

    def __init__(self, interceptor: CallInterceptor, method: str) -> None:
        self._interceptor = interceptor
        self._method = method
        self._decode: Decode = lambda _: _unset()
        self._request: Any = None
        self._max_parts = max_parts_of(method)
        self._serve: Any = None

    def wrap(self, handler: Handler) -> Handler:
        """Return a handler that takes bytes and answers as the given one."""
        if handler.request_deserializer is not None:
            decode: Any = handler.request_deserializer
            # Generated stubs decode by a method of the message's class.
            self._decode, self._request = decode, decode.__self__
        serve: Any
        if handler.stream_stream is not None:
            self._serve, serve = handler.stream_stream, self._serve_stream
        elif handler.unary_stream is not None:
            self._serve, serve = handler.unary_stream, self._serve_unary_stream
        elif handler.unary_unary is not None:
            self._serve, serve = handler.unary_unary, self._serve_unary
        else:
            raise TypeError(f"{self._method}: client streaming is not part of the contract")
        return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)

    # What holds a request is a frame of its own below these, which `forget_frames` lets go of.

    async def _serve_unary(self, bodies: AsyncIterator[bytes], context: Context) -> None:
        with _Timer(self._interceptor.pod, self._method, context):
            try:
                caller = await self._begin(context)
                with self._interceptor.admit(caller) as admission:
                    await context.write(await self._answer(bodies, context, caller, admission))
            except grpc.aio.InternalError as error:
                raise asyncio.CancelledError(CLIENT_GONE) from error
            except Exception as error:
                await self._interceptor.abort(context, self._method, error)

    async def _serve_unary_stream(
        self, bodies: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Message]:
        with _Timer(self._interceptor.pod, self._method, context):
            try:
                caller = await self._begin(context)
                with self._interceptor.admit(caller) as admission:
                    async for response in self._answers(bodies, context, caller, admission):
                        yield response
            except grpc.aio.InternalError as error:
                raise asyncio.CancelledError(CLIENT_GONE) from error
            except Exception as error:
                await self._interceptor.abort(context, self._method, error)

    async def _answer(
        self,
        bodies: AsyncIterator[bytes],
        context: Context,
        caller: Caller,
        admission: AdmittedRequest,
    ) -> Message:
        body = await self._interceptor.read(bodies, context, self._method, caller, admission)
        with bind_body(body):
            response: Message = await self._serve(await self._parse(body), context)
        return response

    async def _answers(
        self,
        bodies: AsyncIterator[bytes],
        context: Context,
        caller: Caller,
        admission: AdmittedRequest,
    ) -> AsyncIterator[Message]:
        body = await self._interceptor.read(bodies, context, self._method, caller, admission)
        with bind_body(body):
            async for response in self._serve(await self._parse(body), context):
                yield response

    async def _serve_stream(
        self, bodies: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Message]:
        with _Timer(self._interceptor.pod, self._method, context):
            try:
                caller = await self._begin(context)
                with self._interceptor.admit(caller) as admission:
                    requests = (
                        await self._parse(body)
                        async for body in counted_one_by_one(bodies, admission)
                    )
                    async for response in self._serve(requests, context):
                        yield response
            except grpc.aio.InternalError as error:
                raise asyncio.CancelledError(CLIENT_GONE) from error
            except Exception as error:
                await self._interceptor.abort(context, self._method, error)

    async def _begin(self, context: Context) -> Caller:
        caller = await self._interceptor.authenticate(self._method, context)
        bind_caller(caller)
        bind_log_fields(
            method=self._method.rpartition("/")[2],
            project=caller.project,
            key_id=caller.key_id,
        )
        return caller

    async def _parse(self, body: bytes) -> Message:
        await check_request(body, self._request.DESCRIPTOR, self._max_parts)
        try:
            request: Message = self._decode(body)
        except DecodeError as error:
            raise MalformedRequestError(
                f"the request is not a valid message of {self._method}; generate the stubs from "
                "the contract of this server",
                method=self._method,
            ) from error
        first_field = request.DESCRIPTOR.fields[0].name if request.DESCRIPTOR.fields else ""
        resource = getattr(request, first_field, "")
        bind_log_fields(
            resource=resource if isinstance(resource, str) else "",
            request_id=str(getattr(request, "request_id", "")),
        )
        return request


class _Timer:
    """Counts and times one call, and makes it a span of its trace."""

    def __init__(self, pod: str, method: str, context: Context) -> None:
        self._pod = pod
        self._method = method
        self._context = context
        self._begin_s = 0.0
        self._span: spans.Span | None = None

    def __enter__(self) -> None:
        if spans.is_on():
            self._span = begin_call(self._pod, self._method, self._context.invocation_metadata())
        self._begin_s = time.perf_counter()
        RPC_IN_FLIGHT.labels(self._method).inc()

    def __exit__(self, *_: object) -> None:
        RPC_IN_FLIGHT.labels(self._method).dec()
        code = self._context.code()
        name = code.name if isinstance(code, grpc.StatusCode) else "OK"
        duration_s = time.perf_counter() - self._begin_s
        RPC_SECONDS.labels(self._method, name).observe(duration_s, exemplar_of(self._span))
        if self._span is not None:
            end_call(self._span, name)


def _unset() -> NoReturn:
    raise AssertionError("the handler was not wrapped")
