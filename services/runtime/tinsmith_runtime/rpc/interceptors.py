"""What happens around every call, in one interceptor: decode, authenticate, time, map errors.

One interceptor rather than a chain, because the order matters and is easier to read in one place. A
call is refused while the pod drains. Its caller is found by its metadata, before a byte of its
request is read: only callers with a key cost memory. Then it is counted, and its bytes are decoded
here: a deserializer that fails inside gRPC would answer `UNKNOWN`. What the servicer raises becomes
a `google.rpc.Status`. This is the only module that maps domain errors to status codes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from tinsmith.rpc.error_codec import encode_status
from tinsmith_runtime.errors import (
    DrainingError,
    MalformedRequestError,
    TinsmithError,
    internal_error,
)
from tinsmith_runtime.observability.logs import bind_log_fields
from tinsmith_runtime.observability.metrics import RPC_ERRORS, RPC_IN_FLIGHT, RPC_SECONDS
from tinsmith_runtime.rpc.auth import Authenticator, Caller, bind_caller
from tinsmith_runtime.rpc.requests import bind_body

logger = logging.getLogger(__name__)

# grpc's classes are generic for the type checker alone.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Decode = Callable[[bytes], Any]

_UNAUTHENTICATED_PREFIX = "/grpc.health.v1.Health/"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of a server.

    Args:
        domain: The `ErrorInfo.domain` of this pod, such as `trainer.tinsmith`.
        authenticator: Finds the caller of each call but health checks.
    """

    def __init__(self, *, domain: str, authenticator: Authenticator) -> None:
        self._domain = domain
        self._authenticator = authenticator
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
        if handler is None or method.startswith(_UNAUTHENTICATED_PREFIX):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        authorization = metadata.get("authorization")
        try:
            caller = await self._admit(
                method, authorization if isinstance(authorization, str) else None
            )
        except Exception as error:
            return self._refusal(method, error)
        return _Call(self, method, caller).wrap(handler)

    async def _admit(self, method: str, authorization: str | None) -> Caller:
        """Return the caller of a call that may go on.

        Raises:
            DrainingError: If the pod is shutting down.
            UnauthenticatedError: If the credential is no good.
            RoleMissingError: If the caller's role does not call the method.
        """
        if self._is_draining:
            raise DrainingError("the pod is shutting down; send the request again")
        caller = await self._authenticator.authenticate(authorization)
        caller.require_method(method)
        return caller

    def _refusal(self, method: str, error: Exception) -> Handler:
        """Return a handler that refuses a call, and never asks for the bytes of its request.

        A handler of streams reads when it is told to. One of a single request is called with the
        whole body, whose size a caller without a key would choose.
        """

        async def refuse(bodies: AsyncIterator[bytes], context: Context) -> None:
            del bodies
            with _Timer(method, context):
                await self.abort(context, method, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def abort(self, context: Context, method: str, error: Exception) -> NoReturn:
        """End a call with the status of an error; a bug is logged with its trace."""
        if not isinstance(error, TinsmithError):
            logger.error("call failed by a bug", exc_info=error, extra={"method": method})
            error = internal_error()
        RPC_ERRORS.labels(method, error.reason).inc()
        status = rpc_status.to_status(encode_status(error, domain=self._domain))
        await context.abort_with_status(status)
        raise AssertionError("abort_with_status returned")


class _Call:
    """One method, wrapped for one call."""

    def __init__(self, interceptor: CallInterceptor, method: str, caller: Caller) -> None:
        self._interceptor = interceptor
        self._method = method
        self._caller = caller
        self._decode: Decode = lambda _: _unset()
        self._serve: Any = None

    def wrap(self, handler: Handler) -> Handler:
        """Return a handler that takes bytes and answers as the given one."""
        if handler.request_deserializer is not None:
            self._decode = handler.request_deserializer
        encode = handler.response_serializer
        if handler.stream_stream is not None:
            self._serve = handler.stream_stream
            return grpc.stream_stream_rpc_method_handler(self._serve_stream, None, encode)
        if handler.unary_stream is not None:
            self._serve = handler.unary_stream
            return grpc.unary_stream_rpc_method_handler(self._serve_unary_stream, None, encode)
        if handler.unary_unary is None:
            raise TypeError(f"{self._method}: client streaming is not part of the contract")
        self._serve = handler.unary_unary
        return grpc.unary_unary_rpc_method_handler(self._serve_unary, None, encode)

    async def _serve_unary(self, body: bytes, context: Context) -> Message:
        with _Timer(self._method, context):
            try:
                self._begin()
                with bind_body(body):
                    response: Message = await self._serve(self._parse(body), context)
                return response
            except Exception as error:
                await self._interceptor.abort(context, self._method, error)

    async def _serve_unary_stream(self, body: bytes, context: Context) -> AsyncIterator[Message]:
        with _Timer(self._method, context):
            try:
                self._begin()
                with bind_body(body):
                    async for response in self._serve(self._parse(body), context):
                        yield response
            except Exception as error:
                await self._interceptor.abort(context, self._method, error)

    async def _serve_stream(
        self, bodies: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Message]:
        with _Timer(self._method, context):
            try:
                self._begin()
                requests = (self._parse(body) async for body in bodies)
                async for response in self._serve(requests, context):
                    yield response
            except Exception as error:
                await self._interceptor.abort(context, self._method, error)

    def _begin(self) -> None:
        bind_caller(self._caller)
        bind_log_fields(
            method=self._method.rpartition("/")[2],
            project=self._caller.project,
            key_id=self._caller.key_id,
        )

    def _parse(self, body: bytes) -> Message:
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
    """Counts and times one call."""

    def __init__(self, method: str, context: Context) -> None:
        self._method = method
        self._context = context
        self._begin_s = 0.0

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()
        RPC_IN_FLIGHT.labels(self._method).inc()

    def __exit__(self, *_: object) -> None:
        RPC_IN_FLIGHT.labels(self._method).dec()
        code = self._context.code()
        name = code.name if isinstance(code, grpc.StatusCode) else "OK"
        RPC_SECONDS.labels(self._method, name).observe(time.perf_counter() - self._begin_s)


def _unset() -> NoReturn:
    raise AssertionError("the handler was not wrapped")
