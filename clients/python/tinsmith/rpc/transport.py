"""Channels, deadlines and retries: how one call reaches a pod."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from google.longrunning import operations_pb2_grpc

from tinsmith.backoff import backoff
from tinsmith.errors import (
    ClientClosedError,
    ConfigurationError,
    DeadlineExceededError,
    ErrorCode,
    TinsmithError,
    UnavailableError,
)
from tinsmith.rpc.channels import open_channel
from tinsmith.rpc.error_codec import decode_rpc_error
from tinsmith.settings import ClientSettings, RetryPolicy
from tinsmith.v1 import (
    checkpoint_pb2_grpc,
    coordinator_pb2_grpc,
    environment_pb2_grpc,
    episode_pb2_grpc,
    job_pb2_grpc,
    keys_pb2_grpc,
    run_metrics_pb2_grpc,
    sampler_pb2_grpc,
    scheduler_pb2_grpc,
    trainer_pb2_grpc,
    usage_pb2_grpc,
)

Request = TypeVar("Request")
Response = TypeVar("Response")

_LOG = logging.getLogger(__name__)

_RELOCATE_INTERVAL_S = 0.5
_TOLD_AFTER_S = 3.0
_TOLD_INTERVAL_S = 30.0
_told_at_s: dict[str, float] = {}
"""When a server that does not answer was last warned of."""
PASSING_CODES = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED})
_AWAY_CODES = PASSING_CODES | {ErrorCode.DEADLINE_EXCEEDED}

_PINNED = ("x-tinsmith-gateway", "pinned")


class Connection:
    """A channel to one address and the stubs on it.

    Args:
        address: `host:port`; `https://host:port` for TLS.
        root_certificates: PEM of the authorities that are trusted; None takes gRPC's own list.
    """

    def __init__(self, address: str, root_certificates: bytes | None = None) -> None:
        self.address = address
        self.channel = open_channel(
            address, root_certificates, begins_traces=True, may_use_proxy=True
        )

    async def close(self) -> None:
        """Close the channel."""
        await self.channel.close()

    @cached_property
    def scheduler(self) -> scheduler_pb2_grpc.SchedulerServiceAsyncStub:
        """Stub of the scheduler."""
        return scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    @cached_property
    def keys(self) -> keys_pb2_grpc.KeyServiceAsyncStub:
        """Stub of the keys, which the scheduler serves."""
        return keys_pb2_grpc.KeyServiceStub(self.channel)

    @cached_property
    def trainer(self) -> trainer_pb2_grpc.TrainerServiceAsyncStub:
        """Stub of a trainer."""
        return trainer_pb2_grpc.TrainerServiceStub(self.channel)

    @cached_property
    def checkpoint(self) -> checkpoint_pb2_grpc.CheckpointServiceAsyncStub:
        """Stub of a trainer's checkpoints."""
        return checkpoint_pb2_grpc.CheckpointServiceStub(self.channel)

    @cached_property
    def sampler(self) -> sampler_pb2_grpc.SamplerServiceAsyncStub:
        """Stub of a sampler."""
        return sampler_pb2_grpc.SamplerServiceStub(self.channel)

    @cached_property
    def environment(self) -> environment_pb2_grpc.EnvironmentServiceAsyncStub:
        """Stub of an environment server."""
        return environment_pb2_grpc.EnvironmentServiceStub(self.channel)

    @cached_property
    def episode(self) -> episode_pb2_grpc.EpisodeServiceAsyncStub:
        """Stub of a coordinator."""
        return episode_pb2_grpc.EpisodeServiceStub(self.channel)

    @cached_property
    def coordinator(self) -> coordinator_pb2_grpc.CoordinatorServiceAsyncStub:
        """Stub of the matches of a coordinator."""
        return coordinator_pb2_grpc.CoordinatorServiceStub(self.channel)

    @cached_property
    def job(self) -> job_pb2_grpc.JobServiceAsyncStub:
        """Stub of the jobs, which the scheduler serves."""
        return job_pb2_grpc.JobServiceStub(self.channel)

    @cached_property
    def run_metrics(self) -> run_metrics_pb2_grpc.RunMetricsServiceAsyncStub:
        """Stub of the metrics of runs, which the scheduler serves."""
        return run_metrics_pb2_grpc.RunMetricsServiceStub(self.channel)

    @cached_property
    def usage(self) -> usage_pb2_grpc.UsageServiceAsyncStub:
        """Stub of usage and budgets, which the scheduler serves."""
        return usage_pb2_grpc.UsageServiceStub(self.channel)

    @cached_property
    def operations(self) -> Any:
        """Stub of `google.longrunning.Operations`, which has no types."""
        return operations_pb2_grpc.OperationsStub(self.channel)


class Endpoint:
    """An address that may change: a pod that restarts elsewhere is looked up again."""

    metadata: tuple[tuple[str, str], ...] = ()
    """What is sent with each call beside the key."""

    def __init__(
        self,
        address: str,
        locate: Callable[[], Awaitable[str]] | None = None,
        *,
        is_direct: bool = False,
    ) -> None:
        self.address = address
        self.is_direct = is_direct
        """Whether it is called there though a gateway wants every call: the user named it."""
        self._locate = locate
        self._lock = asyncio.Lock()
        self._located_at = float("-inf")

    @property
    def may_move(self) -> bool:
        """Whether the address can be looked up again."""
        return self._locate is not None

    async def relocate(self) -> None:
        """Read the address again, at most twice a second. A failure to do so changes nothing."""
        if self._locate is None:
            return
        async with self._lock:
            if time.monotonic() - self._located_at < _RELOCATE_INTERVAL_S:
                return
            try:
                self.address = await self._locate() or self.address
            except TinsmithError as error:
                _LOG.debug("address not found", extra={"error": str(error)})
            finally:
                self._located_at = time.monotonic()


@dataclass(slots=True)
class Backoff:
    """Decides whether and when a failed call is sent again."""

    policy: RetryPolicy
    repeatable: bool = True
    _started_at: float | None = None
    _pauses: Iterator[float] = field(default_factory=lambda: iter(()))

    def delay_s(self, error: TinsmithError, now: float) -> float | None:
        """Return the time to wait before the next attempt; None if there is none.

        Args:
            error: What the last attempt failed with.
            now: A monotonic clock. The budget runs from the first failure.
        """
        is_timeout = isinstance(error, DeadlineExceededError) and self.repeatable
        passing = error.code in PASSING_CODES or error.retry_after_s is not None or is_timeout
        if isinstance(error, ClientClosedError) or not passing:
            return None
        if self._started_at is None:
            self._started_at = now
            self._pauses = backoff(self.policy.initial_backoff_s, self.policy.max_backoff_s)
        left_s = self._started_at + self.policy.budget_s - now
        if left_s <= 0:
            return None
        if now - self._started_at >= _TOLD_AFTER_S:
            _tell_once(f"{error.message}; trying again for up to {left_s:.0f} s", now)
        delay_s = next(self._pauses)
        if error.retry_after_s is not None:
            # A server's hint is spread like the pauses.
            delay_s = max(delay_s, random.uniform(0.5, 1.0) * error.retry_after_s)
        return min(delay_s, left_s)

    def gave_up(self, error: TinsmithError, now: float) -> TinsmithError:
        """Return the error with a word about how long it was tried, if it was."""
        if self._started_at is not None and now - self._started_at > 0:
            tried_s = now - self._started_at
            error.message = f"{error.message}, tried again for {tried_s:.0f} s"
        return error


def _tell_once(sentence: str, now: float) -> None:
    """Warn of a server that does not answer; once a while, however many calls wait for it."""
    if now - _told_at_s.get("last", float("-inf")) >= _TOLD_INTERVAL_S:
        _told_at_s["last"] = now
        _LOG.warning("%s", sentence)


def is_away(error: TinsmithError) -> bool:
    """Return whether the pod may have moved: it is gone, says so, or does not answer in time."""
    return error.code in _AWAY_CODES


class Transport:
    """Sends calls. Used inside the background loop only.

    A server may say that it is the one address that clients are to call. A gateway does, in front
    of pods whose own addresses lead nowhere from outside. From then on every call goes there.

    Args:
        settings: Of the client.
        connect: Opens the connection to an address; in the way of clients by default.

    Raises:
        ConfigurationError: If the file of trusted authorities cannot be read.
    """

    def __init__(
        self, settings: ClientSettings, connect: Callable[[str], Connection] | None = None
    ) -> None:
        self.settings = settings
        self.is_pinned = False
        root_certificates = _read_certificates(settings.ca_file)
        self._connect = connect or (lambda address: Connection(address, root_certificates))
        self._connections: dict[str, Connection] = {}
        self._metadata = (("authorization", f"Bearer {settings.api_key}"),)
        self._closed = False

    def connection(self, address: str) -> Connection:
        """Return the connection to an address, opening it if need be."""
        if self._closed:
            raise ClientClosedError("the client is closed", remedy="open a new Client")
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = self._connect(address)
        return connection

    def _address_of(self, endpoint: Endpoint) -> str:
        is_pinned = self.is_pinned and not endpoint.is_direct
        return self.settings.address if is_pinned else endpoint.address

    def _learn(self, metadata: Any) -> None:
        """Find out whether the server wants every call at the one address."""
        self.is_pinned = any(entry == _PINNED for entry in metadata or ())

    async def call_once(
        self,
        endpoint: Endpoint,
        method: Callable[[Connection], grpc.aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        *,
        timeout_s: float | None = None,
    ) -> Response:
        """Send one request once.

        Raises:
            TinsmithError: If the call fails.
        """
        address = self._address_of(endpoint)
        timeout_s = self.settings.call_timeout_s if timeout_s is None else timeout_s
        try:
            call = method(self.connection(address))(
                request, timeout=timeout_s, metadata=self._metadata + endpoint.metadata
            )
            response = await call
            if address == self.settings.address and not self.is_pinned:
                self._learn(await call.initial_metadata())
            return response
        except grpc.aio.AioRpcError as error:
            if endpoint.may_move and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise _wrong_server(address) from error
            raise decode_rpc_error(error, address=address, server=self.settings.address) from None
        except grpc.aio.UsageError as error:
            raise ClientClosedError("the client is closed", remedy="open a new Client") from error

    async def call(
        self,
        endpoint: Endpoint,
        method: Callable[[Connection], grpc.aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        *,
        timeout_s: float | None = None,
        repeatable: bool = True,
        retry: RetryPolicy | None = None,
    ) -> Response:
        """Send a request, again after passing failures, until the retry budget is used up.

        Args:
            endpoint: Where to; its address is read again after a failure.
            method: The stub's method.
            request: The same bytes, with the same request id, go out each time.
            timeout_s: Deadline of each attempt; the settings' `call_timeout_s` by default.
            repeatable: Whether a call that ran into its deadline may be sent again.
            retry: How it is sent again; the settings' `retry` by default.

        Raises:
            TinsmithError: If the call fails for good, or the budget is used up.
        """
        backoff = Backoff(retry or self.settings.retry, repeatable)
        while True:
            try:
                return await self.call_once(endpoint, method, request, timeout_s=timeout_s)
            except TinsmithError as error:
                delay_s = backoff.delay_s(error, time.monotonic())
                if delay_s is None:
                    # What gRPC says is in the message; a second trace would only hide it.
                    raise backoff.gave_up(error, time.monotonic()) from None
                _LOG.debug("call is sent again", extra={"error": str(error), "delay_s": delay_s})
                await asyncio.sleep(delay_s)
                if is_away(error):
                    await self.relocate(endpoint)

    async def relocate(self, endpoint: Endpoint) -> None:
        """Read the address of a pod again, unless every call goes to the one address."""
        if not self.is_pinned:
            await endpoint.relocate()

    def open_stream(
        self,
        endpoint: Endpoint,
        method: Callable[[Connection], grpc.aio.StreamStreamMultiCallable[Request, Response]],
    ) -> grpc.aio.StreamStreamCall[Request, Response]:
        """Open a stream in both directions, which has no deadline of its own.

        Raises:
            ClientClosedError: If the client is closed.
        """
        call = method(self.connection(self._address_of(endpoint)))
        return call(metadata=self._metadata + endpoint.metadata)

    async def stream_once(
        self,
        endpoint: Endpoint,
        method: Callable[[Connection], grpc.aio.UnaryStreamMultiCallable[Request, Response]],
        request: Request,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Response, None]:
        """Send one request once, and yield what is streamed back.

        Args:
            endpoint: Where to.
            method: The stub's method.
            request: What is sent.
            timeout_s: How long to wait for each message; that of a call by default.

        Raises:
            TinsmithError: If the call fails, or nothing arrives in that time.
        """
        address = self._address_of(endpoint)
        timeout_s = self.settings.call_timeout_s if timeout_s is None else timeout_s
        call: Any = None
        try:
            call = method(self.connection(address))(
                request, metadata=self._metadata + endpoint.metadata
            )
            while True:
                async with asyncio.timeout(timeout_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield cast(Response, message)
        except TimeoutError as error:
            raise UnavailableError(
                f"{address} sent nothing for {timeout_s:g} s", retry_after_s=0.0
            ) from error
        except grpc.aio.AioRpcError as error:
            if endpoint.may_move and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise _wrong_server(address) from error
            raise decode_rpc_error(error, address=address, server=self.settings.address) from None
        except grpc.aio.UsageError as error:
            raise ClientClosedError("the client is closed", remedy="open a new Client") from error
        finally:
            # A reader that stops early; on a call that ended it does nothing.
            if call is not None:
                call.cancel()

    async def close(self) -> None:
        """Close all channels."""
        self._closed = True
        connections = list(self._connections.values())
        self._connections.clear()
        for connection in connections:
            await connection.close()


def _wrong_server(address: str) -> UnavailableError:
    """Return the error of a pod that may have moved: it left its port to another process."""
    return UnavailableError(
        f"{address} does not have this call: another server listens there now, or the server is "
        "of an older release",
        retry_after_s=0.0,
    )


def _read_certificates(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"the file of trusted authorities {path} cannot be read: {error.strerror}",
            remedy="set TINSMITH_CA_FILE or ca_file= to a PEM file",
        ) from error
