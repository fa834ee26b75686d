"""Health checks that never ask for the bytes of a request.

They need no key, and a handler of a single request is called with the whole body, of a size that a
stranger chooses. Every pod reports one status, that of the process, so that nothing in the request
matters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

PREFIX = "/grpc.health.v1.Health/"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Health(grpc.GenericRpcHandler):
    """Answers `Check` and `Watch` with the status of the process."""

    def __init__(self) -> None:
        self._servicer = health_aio.HealthServicer()
        self.is_serving = False
        """Whether calls are answered."""

    async def report(self, *, is_serving: bool) -> None:
        """Answer with this status from now on."""
        self.is_serving = is_serving
        status = health_pb2.HealthCheckResponse
        await self._servicer.set("", status.SERVING if is_serving else status.NOT_SERVING)

    async def enter_graceful_shutdown(self) -> None:
        """Answer with NOT_SERVING for good."""
        self.is_serving = False
        await self._servicer.enter_graceful_shutdown()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return what answers a method of the health service."""
        serve = {f"{PREFIX}Check": self._check, f"{PREFIX}Watch": self._watch}.get(
            handler_call_details.method
        )
        if serve is None:
            return None
        return grpc.stream_stream_rpc_method_handler(
            serve, None, health_pb2.HealthCheckResponse.SerializeToString
        )

    async def _check(self, bodies: AsyncIterator[bytes], context: Context) -> None:
        del bodies
        answer = await self._servicer.Check(health_pb2.HealthCheckRequest(), context)
        try:
            await context.write(answer)
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError("the client is gone") from error

    async def _watch(self, bodies: AsyncIterator[bytes], context: Context) -> None:
        del bodies
        try:
            await self._servicer.Watch(health_pb2.HealthCheckRequest(), context)
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError("the client is gone") from error
