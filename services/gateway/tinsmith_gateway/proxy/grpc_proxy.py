"""Native gRPC calls, passed through to the pod that owns their resource.

The gateway authenticates the caller, reads field 1 of the request, and passes bytes on: requests
and answers are not decoded, statuses come back with their details as the pod made them. It adds
nothing to what a key may do: the pods see the caller's own key and decide.

A call is sent once. It is sent a second time only if the first pod answered that it does not have
the resource (any more): every call carries a request id or changes nothing. All other failures are
the client's to retry, because it knows its own deadline; the address is forgotten meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from tinsmith.rpc.error_codec import decode_status, encode_status, status_of
from tinsmith.tracing import spans
from tinsmith_gateway.access.authentication import Callers, Credential
from tinsmith_gateway.metrics import NATIVE_ERRORS, NATIVE_SECONDS, REROUTED_CALLS
from tinsmith_gateway.proxy.protobuf_scan import read_text_field
from tinsmith_gateway.proxy.proxied_methods import METHODS, Method
from tinsmith_gateway.proxy.sampled_prompts import prompt_of
from tinsmith_gateway.serving.shutdown import Drain
from tinsmith_gateway.upstream.pod_directory import Directory, Route, pod_role_of
from tinsmith_gateway.upstream.routing import (
    Owner,
    RunOwner,
    SamplingOwner,
    SchedulerOwner,
    owner_of,
)
from tinsmith_runtime.errors import (
    CheckpointNotFoundError,
    NotFoundError,
    OperationNotFoundError,
    RunMovedError,
    RunNotFoundError,
    SamplingSessionNotFoundError,
    UnimplementedError,
    WorkerUnavailableError,
)
from tinsmith_runtime.fairness.fair_slots import FairSlots
from tinsmith_runtime.observability.logs import bind_log_fields
from tinsmith_runtime.rpc.auth import CHARGED_KEY_HEADER
from tinsmith_runtime.rpc.body_reading import BodyReader, counted_one_by_one, first_of
from tinsmith_runtime.rpc.in_flight import AdmittedRequest, Limits
from tinsmith_runtime.rpc.interceptors import CLIENT_GONE, end_with, error_to_tell, forget_frames
from tinsmith_runtime.rpc.message_parts import check_size
from tinsmith_runtime.rpc.peers import address_of, bind_peer
from tinsmith_runtime.rpc.pod_identity import PodRole
from tinsmith_runtime.rpc.server_spans import begin_call, end_call, exemplar_of
from tinsmith_runtime.tenant import bind_tenant

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MetadataItems: TypeAlias = tuple[tuple[str, str | bytes], ...]

DOMAIN = "gateway.tinsmith"
GATEWAY_HEADER = "x-tinsmith-gateway"
"""Initial metadata of the scheduler's answers: `pinned` tells a client to send every call here."""

_NUM_SHORT_CALLS, _NUM_OF_PROJECT = (
    64,
    {f"tinsmith.v1.{name}": 4 for name in ("EpisodeService", "CoordinatorService")},
)
"""Short calls of a service that run at once: of all projects, and of one if not two."""
_DETAILS_KEY = "grpc-status-details-bin"
# What the scheduler says of a run of another project would tell that there is one.
_TELLING = (NotFoundError, WorkerUnavailableError)
_PASSED_ON = frozenset({"traceparent", "tracestate", "baggage", "x-request-id"})
_PASSED_ON_PREFIX = "x-tinsmith-"
# Headers of one connection, which mean nothing on another.
_OWN_HEADERS = ("content-type", "user-agent", "te", "grpc-", ":")


_PassOn: TypeAlias = (
    "Callable[[AsyncIterator[bytes], Context, Credential, AdmittedRequest], Awaitable[None]]"
)


class PassThrough(grpc.GenericRpcHandler):
    """Answers every method of the contract with the answer of the pod that owns the resource.

    Args:
        callers: Authenticates callers.
        directory: Knows where pods are.
        open_channel: Returns the channel to a pod, by its address and role.
        limits: Of each project.
        drain: Whether the gateway is shutting down.
        reader: Reads requests.
        max_call_s: Deadline of a call that has none, and the longest that one may have.
        pins_clients: Whether clients are told that the pods' own addresses are not for them.
    """

    def __init__(
        self,
        callers: Callers,
        directory: Directory,
        open_channel: Callable[[str, PodRole], grpc.aio.Channel],
        limits: Limits,
        drain: Drain,
        reader: BodyReader,
        *,
        max_call_s: float,
        pins_clients: bool,
    ) -> None:
        self._callers = callers
        self._directory = directory
        self._open_channel = open_channel
        self._limits = limits
        self._max_call_s = max_call_s
        self._pins_clients = pins_clients
        self._drain = drain
        self._reader = reader
        self._stubs: dict[tuple[str, str], Any] = {}
        self._turns = {
            service: FairSlots(_NUM_SHORT_CALLS, _NUM_OF_PROJECT.get(service, 2))
            for service in {method.service for method in METHODS.values()}
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return what passes a method through; health checks are answered elsewhere."""
        path = handler_call_details.method
        method = METHODS.get(path)
        if method is None:
            return grpc.stream_stream_rpc_method_handler(_refuse_unknown)
        call = _Passage(self, method)
        # All are served as streams, which read when they are told to: the caller is found first.
        if method.streams_requests:
            return grpc.stream_stream_rpc_method_handler(call.serve_both_streams)
        if method.streams_responses:
            return grpc.stream_stream_rpc_method_handler(call.serve_stream)
        return grpc.stream_stream_rpc_method_handler(call.serve_unary)

    async def authenticate(self, method: Method, context: Context) -> Credential:
        """Return the caller.

        Raises:
            DrainingError: If the gateway is shutting down.
            UnauthenticatedError: If the key is no good.
            PermissionDeniedError: If it is of a pod or an episode, or of a role that does not call
                the method.
        """
        self._drain.check()
        bind_peer(address_of(context.peer()))
        headers = {
            str(key): value
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        credential = await self._callers.authenticate(headers)
        credential.require_user()
        credential.caller.require_method(method.path)
        bind_tenant(credential.caller.project)
        bind_log_fields(project=credential.caller.project, key_id=credential.caller.key_id)
        return credential

    @contextlib.contextmanager
    def admitted(self, method: Method, credential: Credential) -> Iterator[AdmittedRequest]:
        """Count a call while it runs; one that only waits is cut when the gateway drains.

        Raises:
            RateLimitedError: If the project has too much in flight.
            DrainingError: If it was cut.
        """
        tenant = credential.caller.tenant
        with self._limits.admit(tenant, is_wait=method.is_wait) as admission:
            if not method.is_wait:
                yield admission
                return
            with self._drain.running(is_wait=True):
                yield admission

    def timeout_s(self, context: Context) -> float:
        """Return the time that a call has left."""
        remaining_s = context.time_remaining()
        return self._max_call_s if remaining_s is None else min(remaining_s, self._max_call_s)

    async def read(
        self,
        method: Method,
        bodies: AsyncIterator[bytes],
        context: Context,
        credential: Credential,
        admission: AdmittedRequest,
    ) -> bytes:
        """Return the one request of a call; see `BodyReader.read`."""
        return await self._reader.read(
            bodies,
            admission,
            method=method.path,
            project=credential.caller.project,
            timeout_s=self.timeout_s(context),
        )

    async def stub(self, method: Method, owner: Owner) -> tuple[Any, Route]:
        """Return the callable of a method at the pod that owns a resource, and where that is.

        Raises:
            TinsmithError: What the scheduler says of the resource, or that no pod holds it.
        """
        route = await self._directory.route_to(owner)
        entry = (route.address, method.path)
        stub = self._stubs.get(entry)
        if stub is None:
            channel = self._open_channel(route.address, pod_role_of(owner))
            if method.streams_requests:
                stub = channel.stream_stream(method.path)
            elif method.streams_responses:
                stub = channel.unary_stream(method.path)
            else:
                stub = channel.unary_unary(method.path)
            self._stubs[entry] = stub
        return stub, route

    def turn(
        self, method: Method, credential: Credential
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold a place for a short call: those of one project wait for each other."""
        if not method.is_short:
            return contextlib.nullcontext()
        return self._turns[method.service].hold(credential.caller.project)

    def in_flight(self, owner: Owner, address: str) -> contextlib.AbstractContextManager[None]:
        """Count a call to a pod while it runs."""
        return self._directory.in_flight(owner, address)

    def may_have_moved(self, owner: Owner, address: str, error: grpc.aio.AioRpcError) -> bool:
        """Forget an address that failed; return whether the call may be sent to a new one."""
        if isinstance(owner, SchedulerOwner):
            return False
        reason = _reason_of(error)
        is_elsewhere = reason == RunMovedError.reason or (
            error.code() is grpc.StatusCode.UNIMPLEMENTED
        )
        if is_elsewhere or error.code() is grpc.StatusCode.UNAVAILABLE:
            self._directory.forget(owner, "" if is_elsewhere else address)
        return is_elsewhere

    def headers_of(self, owner: Owner) -> MetadataItems:
        """Return what the gateway adds to the initial metadata of an answer."""
        if self._pins_clients and isinstance(owner, SchedulerOwner):
            return ((GATEWAY_HEADER, "pinned"),)
        return ()


class _Passage:
    """One method, for one call."""

    def __init__(self, gateway: PassThrough, method: Method) -> None:
        self._gateway = gateway
        self._method = method
        self._owner: Owner = SchedulerOwner()
        self._foreign: NotFoundError | None = None

    # What holds the bytes of a request is a frame of its own below these: gRPC keeps the error of a
    # refused call, with all frames that it passed, until the garbage collector comes.

    async def serve_unary(self, bodies: AsyncIterator[bytes], context: Context) -> None:
        """Pass one request and one answer."""
        await self._serve(self._answer, bodies, context)

    async def serve_stream(self, bodies: AsyncIterator[bytes], context: Context) -> None:
        """Pass one request and a stream of answers."""
        await self._serve(self._answer_in_parts, bodies, context)

    async def serve_both_streams(self, bodies: AsyncIterator[bytes], context: Context) -> None:
        """Pass two streams; the first request says where they go."""
        await self._serve(self._converse, bodies, context)

    async def _serve(
        self, pass_on: _PassOn, bodies: AsyncIterator[bytes], context: Context
    ) -> None:
        """Pass a call on; end it with the status of whatever was raised, and time it."""
        span: spans.Span | None = None
        if spans.is_on():
            metadata = context.invocation_metadata()
            span = begin_call("gateway", self._method.path, metadata, begins=True)
        begin_s = time.perf_counter()
        try:
            credential = await self._gateway.authenticate(self._method, context)
            with self._gateway.admitted(self._method, credential) as admission:
                await pass_on(bodies, context, credential, admission)
        except grpc.aio.AioRpcError as error:
            forget_frames(error)
            if self._foreign is not None and error.code() is grpc.StatusCode.NOT_FOUND:
                await _abort(context, self._method.path, self._foreign)
            await _abort_with(context, self._method, self._owner, error)
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError(CLIENT_GONE) from error
        except Exception as error:
            is_telling = isinstance(error, _TELLING)
            hidden = self._foreign if is_telling else None
            if hidden is not None:
                forget_frames(error)
            await _abort(context, self._method.path, hidden or error)
        finally:
            code = context.code()
            name = code.name if isinstance(code, grpc.StatusCode) else "OK"
            NATIVE_SECONDS.labels(self._method.path, name).observe(
                time.perf_counter() - begin_s, exemplar_of(span)
            )
            if span is not None:
                end_call(span, name)

    async def _answer(
        self,
        bodies: AsyncIterator[bytes],
        context: Context,
        credential: Credential,
        admission: AdmittedRequest,
    ) -> None:
        body = await self._gateway.read(self._method, bodies, context, credential, admission)
        await self._find_owner(body, credential)
        async with self._gateway.turn(self._method, credential):
            answer = await self._pass_unary(body, context, credential)
        await context.write(answer)

    async def _answer_in_parts(
        self,
        bodies: AsyncIterator[bytes],
        context: Context,
        credential: Credential,
        admission: AdmittedRequest,
    ) -> None:
        body = await self._gateway.read(self._method, bodies, context, credential, admission)
        await self._find_owner(body, credential)
        await self._pass_stream(lambda: body, context, credential, attempts=2)

    async def _converse(
        self,
        bodies: AsyncIterator[bytes],
        context: Context,
        credential: Credential,
        admission: AdmittedRequest,
    ) -> None:
        requests = aiter(bodies)
        first = await first_of(
            requests, method=self._method.path, timeout_s=self._gateway.timeout_s(context)
        )
        await self._find_owner(first or b"", credential)

        async def all_requests() -> AsyncIterator[bytes]:
            if first is not None:
                admission.add_bytes(len(first))
                yield first
            async for body in counted_one_by_one(requests, admission):
                yield body

        # What the client has sent cannot be taken back: one attempt.
        await self._pass_stream(all_requests, context, credential, attempts=1)

    async def _find_owner(self, body: bytes, credential: Credential) -> None:
        check_size(body, self._method.request)
        resource = read_text_field(body) if self._method.is_named else ""
        spread = read_text_field(body, 2) if self._method.is_spread else ""
        prompt = await prompt_of(self._method.path, body) if self._method.is_sampling else b""
        method = self._method.path.rpartition("/")[2]
        bind_log_fields(method=method, resource=resource)
        owner = owner_of(
            self._method.service,
            method,
            resource,
            pool=credential.caller.pool,
            spread=spread,
            prompt=prompt,
        )
        if owner is None:
            raise _unknown(self._method.path)
        self._owner = owner
        self._foreign = foreign_error(owner, resource, credential.caller.project)

    async def _pass_unary(self, body: bytes, context: Context, credential: Credential) -> bytes:
        for is_last in (False, True):
            stub, route = await self._gateway.stub(self._method, self._owner)
            address, metadata = route.address, _onward(context, credential, route)
            call = stub(body, timeout=self._gateway.timeout_s(context), metadata=metadata)
            try:
                with self._gateway.in_flight(self._owner, address):
                    answer: bytes = await call
            except grpc.aio.AioRpcError as error:
                if not self._gateway.may_have_moved(self._owner, address, error) or is_last:
                    raise
                REROUTED_CALLS.inc()
                continue
            finally:
                call.cancel()
            await self._send_initial(context, call)
            _set_trailing(context, await call.trailing_metadata())
            return answer
        raise AssertionError("the last attempt returns or raises")

    async def _pass_stream(
        self,
        request: Callable[[], Any],
        context: Context,
        credential: Credential,
        *,
        attempts: int,
    ) -> None:
        for left in reversed(range(attempts)):
            stub, route = await self._gateway.stub(self._method, self._owner)
            address, metadata = route.address, _onward(context, credential, route)
            in_flight = self._gateway.in_flight(self._owner, address)
            call = stub(request(), timeout=self._gateway.timeout_s(context), metadata=metadata)
            try:
                with self._gateway.in_flight(self._owner, address):
                    message = await call.read()
            except grpc.aio.AioRpcError as error:
                call.cancel()
                if not self._gateway.may_have_moved(self._owner, address, error) or left == 0:
                    raise
                REROUTED_CALLS.inc()
                continue
            except BaseException:
                call.cancel()
                raise
            try:
                await self._send_initial(context, call)
                with in_flight:
                    while message is not grpc.aio.EOF:
                        await context.write(message)
                        message = await call.read()
                _set_trailing(context, await call.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                self._gateway.may_have_moved(self._owner, address, error)
                raise
            finally:
                call.cancel()
            return

    async def _send_initial(self, context: Context, call: Any) -> None:
        metadata = (
            *_foreign(await call.initial_metadata()),
            *self._gateway.headers_of(self._owner),
        )
        if metadata:
            await context.send_initial_metadata(metadata)


def foreign_error(owner: Owner, resource: str, project: str) -> NotFoundError | None:
    """Return the one answer for a resource of another project that is not there for the caller.

    The answer must not reveal whether it exists: the scheduler, which knows no such run, and the
    pod, which does not let the caller see it, read alike.
    """
    if not isinstance(owner, RunOwner | SamplingOwner) or resource.split("/")[1] == project:
        return None
    classes = {
        "checkpoints": CheckpointNotFoundError,
        "operations": OperationNotFoundError,
        "samplingSessions": SamplingSessionNotFoundError,
    }
    parts = resource.split("/")
    error_class = classes.get(parts[-2], RunNotFoundError)
    return error_class(f"{resource} does not exist in this project", resource=resource)


async def _refuse_unknown(bodies: AsyncIterator[bytes], context: Context) -> NoReturn:
    del bodies
    await _abort(context, "unknown", _unknown("this"))
    raise AssertionError("abort returned")


async def _abort(context: Context, path: str, error: Exception) -> None:
    """End a call with an error of the gateway's own."""
    told = error_to_tell(error, path)
    NATIVE_ERRORS.labels(path, told.reason).inc()
    await end_with(context, encode_status(told, domain=DOMAIN))


async def _abort_with(
    context: Context, method: Method, owner: Owner, error: grpc.aio.AioRpcError
) -> None:
    """End a call with the status that the pod, or the way to it, ended it with."""
    trailing = _foreign(error.trailing_metadata())
    if not any(key == _DETAILS_KEY for key, _ in trailing):
        is_scheduler = isinstance(owner, SchedulerOwner)
        is_gone = error.code() is grpc.StatusCode.UNAVAILABLE or (
            # Another pod listens where this one did, as after a restart of several.
            error.code() is grpc.StatusCode.UNIMPLEMENTED and not is_scheduler
        )
        if is_gone:
            what = "the scheduler" if is_scheduler else "the pod that holds the resource"
            await _abort(
                context,
                method.path,
                WorkerUnavailableError(f"{what} cannot be reached; send the request again"),
            )
    try:
        await context.abort(error.code(), error.details() or "", trailing)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError(CLIENT_GONE) from gone


def _onward(context: Context, credential: Credential, route: Route) -> MetadataItems:
    """Return what goes on to the pod: the caller's key, and what traces a request.

    Where the gateway chose the pod, what the caller says of its choice is left out. So is the key
    that is charged: of a call under the key of an episode pods would believe it.
    """
    own = {CHARGED_KEY_HEADER, *(key for key, _ in route.metadata)}
    passed = (
        (key, value)
        for key, value in context.invocation_metadata() or ()
        if key not in own and (key in _PASSED_ON or key.startswith(_PASSED_ON_PREFIX))
    )
    return (*passed, *credential.metadata, *route.metadata)


def _foreign(metadata: Any) -> MetadataItems:
    """Return the metadata of an answer without what belongs to its connection."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key == _DETAILS_KEY or not key.startswith(_OWN_HEADERS)
    )


def _set_trailing(context: Context, metadata: Any) -> None:
    trailing = _foreign(metadata)
    if trailing:
        context.set_trailing_metadata(trailing)


def _reason_of(error: grpc.aio.AioRpcError) -> str:
    status = status_of(error)
    return "" if status is None else decode_status(status).reason


def _unknown(path: str) -> UnimplementedError:
    return UnimplementedError(
        f"{path} is no method of this server's contract; generate the stubs from it"
    )
