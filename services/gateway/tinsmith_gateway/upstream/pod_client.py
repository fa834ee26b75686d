"""Calls to the pods behind the gateway, routed as native calls are, repeated while they are away.

Every call carries a request id or changes nothing, so it may be sent again: to the same pod, or to
the one that took its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from tinsmith.backoff import backoff
from tinsmith.replicas import prompt_bytes
from tinsmith.v1 import sampler_pb2
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.upstream.pod_directory import Directory, pod_role_of
from tinsmith_gateway.upstream.routing import Owner, owner_of
from tinsmith_runtime.errors import ErrorCode, InternalError, TinsmithError
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_runtime.rpc.scheduler_client import typed_errors

ResponseT = TypeVar("ResponseT", bound=Message)

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
# What a pod may say that does not hold the resource any more, or is not there.
_ELSEWHERE_CODES = frozenset(
    {ErrorCode.UNAVAILABLE, ErrorCode.NOT_FOUND, ErrorCode.DEADLINE_EXCEEDED}
)


class Upstream:
    """Connections to all pods, made when they are needed.

    Args:
        directory: Where pods are.
        credentials: Of the gateway.
        timeout_s: Time that a call may take unless it is told otherwise, retries included.
    """

    def __init__(
        self, directory: Directory, credentials: PodCredentials, *, timeout_s: float
    ) -> None:
        self._directory = directory
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._channels: dict[tuple[str, PodRole], grpc.aio.Channel] = {}
        self._methods: dict[tuple[str, str, str], Any] = {}

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            await channel.close()
        await self._directory.close()

    def channel(self, address: str, role: PodRole) -> grpc.aio.Channel:
        """Return the channel to a pod of a role."""
        channel = self._channels.get((address, role))
        if channel is None:
            channel = self._credentials.open_channel(address, role)
            self._channels[address, role] = channel
        return channel

    async def call(
        self,
        service: str,
        method: str,
        request: Message,
        response: type[ResponseT],
        credential: Credential,
        *,
        timeout_s: float | None = None,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> ResponseT:
        """Send a request to the pod that owns field 1 of it, and return the answer.

        Args:
            service: Full name of the service, see `routing`.
            method: Name of the method.
            request: The request; sent again as it is.
            response: Type of the answer.
            credential: Whose call it is.
            timeout_s: Time for all attempts together.
            on_wait: Told why the next attempt is waited for, and nothing when it begins.

        Raises:
            TinsmithError: What the pod answered; the last passing failure if time ran out.
        """
        deadline_s = time.monotonic() + (timeout_s or self._timeout_s)
        owner = _owner(service, method, request, credential)
        pauses = backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.001)
            try:
                return await self._once(
                    owner, service, method, request, response, credential, left_s
                )
            except TinsmithError as error:
                pause_s = next(pauses)
                may_pass = error.code is ErrorCode.UNAVAILABLE
                if not may_pass or time.monotonic() + pause_s >= deadline_s:
                    raise
                on_wait(error.message)
            await asyncio.sleep(pause_s)
            on_wait("")

    async def stream(
        self,
        service: str,
        method: str,
        request: Message,
        response: type[ResponseT],
        credential: Credential,
        *,
        timeout_s: float,
    ) -> AsyncGenerator[ResponseT]:
        """Send a request once and yield what is streamed back.

        Raises:
            TinsmithError: What the pod answered.
        """
        owner = _owner(service, method, request, credential)
        route = await self._directory.route_to(owner)
        address = route.address
        counted = self._directory.in_flight(owner, address)
        call = self.channel(address, pod_role_of(owner)).unary_stream(
            f"/{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        streamed = call(
            request, timeout=timeout_s, metadata=(*credential.metadata, *route.metadata)
        )
        try:
            with counted:
                async with typed_errors(service, may_move=True):
                    async for message in streamed:
                        yield message
        except TinsmithError as error:
            self._note(owner, address, error)
            raise
        finally:
            # A reader that stops tells the pod to stop working.
            streamed.cancel()

    async def _once(
        self,
        owner: Owner,
        service: str,
        method: str,
        request: Message,
        response: type[ResponseT],
        credential: Credential,
        timeout_s: float,
    ) -> ResponseT:
        route = await self._directory.route_to(owner)
        address = route.address
        entry = (address, service, method)
        call = self._methods.get(entry)
        if call is None:
            call = self._methods[entry] = self.channel(address, pod_role_of(owner)).unary_unary(
                f"/{service}/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=response.FromString,
            )
        try:
            with self._directory.in_flight(owner, address):
                async with typed_errors(service, may_move=True):
                    answer: ResponseT = await call(
                        request,
                        timeout=timeout_s,
                        metadata=(*credential.metadata, *route.metadata),
                    )
                    return answer
        except TinsmithError as error:
            self._note(owner, address, error)
            raise

    def _note(self, owner: Owner, address: str, error: TinsmithError) -> None:
        """Ask for an address again that failed."""
        if error.code in _ELSEWHERE_CODES:
            is_away = error.code is ErrorCode.UNAVAILABLE
            self._directory.forget(owner, address if is_away else "")


def _owner(service: str, method: str, request: Message, credential: Credential) -> Owner:
    value = getattr(request, request.DESCRIPTOR.fields[0].name) if request.DESCRIPTOR.fields else ""
    resource = value if isinstance(value, str) else ""
    prompt = b""
    if isinstance(request, sampler_pb2.SampleRequest):
        prompt = prompt_bytes(request.prompt)
    elif isinstance(request, sampler_pb2.StreamSampleRequest):
        prompt = prompt_bytes(request.request.prompt)
    owner = owner_of(service, method, resource, pool=credential.caller.pool, prompt=prompt)
    if owner is None:
        raise InternalError(f"no pod has the service {service}")
    return owner
