"""The gRPC server of a pod: limits, health, graceful drain.

Reflection stays off: the contract is public, the set of methods of a pod is not for probing.
Keepalive pings are answered as often as our clients send them and no oftener; a handshake that
does not finish is dropped. A connection without calls is closed after a while. One of a great age
is asked to come anew, so that a balancer can spread what was long-lived.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.observability.metrics import MetricsServer
from tinsmith_runtime.rpc.auth import Authenticator
from tinsmith_runtime.rpc.body_reading import BodyReader
from tinsmith_runtime.rpc.health import Health
from tinsmith_runtime.rpc.in_flight import Limits, LimitSettings
from tinsmith_runtime.rpc.interceptors import CallInterceptor
from tinsmith_runtime.rpc.pod_tls import PodTls

logger = logging.getLogger(__name__)

_MAX_PORT = 65_535


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Listening and shutdown settings of one pod."""

    listen_address: str = "127.0.0.1:0"
    """`host:port`; port 0 picks a free one."""
    tls: PodTls | None = None
    """The certificate that is shown, and that callers have to match; None serves in clear."""
    metrics_address: str | None = None
    """`host:port` of the Prometheus endpoint; None serves none."""
    drain_timeout_s: float = 30.0
    """Time that running calls get to finish after SIGTERM."""
    max_message_bytes: int = 64 * 2**20
    """Limit of one request or response."""
    max_calls: int = 4096
    """Calls served at once, long polls among them; more are refused with RATE_LIMITED."""
    max_calls_per_project: int = 3072
    """Those of one project, so that one cannot take them all."""
    max_bytes: int = 2**30
    """Bytes of the requests in flight; more are refused with RATE_LIMITED."""
    max_bytes_per_project: int = 2**29
    """Those of one project, which may always have one request in flight."""
    max_reads: int = 16
    """Requests read at once, each of which may be as large as a message; more wait."""
    read_timeout_s: float = 300.0
    """Time for a request to arrive."""
    max_connection_idle_s: float = 900.0
    """Closes a connection that had no call for so long."""
    max_connection_age_s: float = 3600.0
    """Asks a connection of this age to come anew; its running calls go on."""
    connection_grace_s: float = 2 * 3600.0
    """Time that these calls get, longer than any call lasts."""
    keepalive_time_s: float = 30.0
    """Pings an idle connection this often."""
    min_ping_interval_s: float = 5.0
    """Closes connections of clients that ping oftener."""
    handshake_timeout_s: float = 10.0
    """Drops a connection whose handshake takes longer."""

    def __post_init__(self) -> None:
        for field in (
            "drain_timeout_s",
            "max_message_bytes",
            "max_calls",
            "max_calls_per_project",
            "max_bytes",
            "max_bytes_per_project",
            "max_reads",
            "read_timeout_s",
            "max_connection_idle_s",
            "max_connection_age_s",
            "connection_grace_s",
            "keepalive_time_s",
            "min_ping_interval_s",
            "handshake_timeout_s",
        ):
            value = getattr(self, field)
            if value <= 0:
                raise ConfigError(f"{field} must be positive, got {value}")
        check_address("listen_address", self.listen_address)
        if self.metrics_address is not None:
            check_address("metrics_address", self.metrics_address)

    def limits(self) -> LimitSettings:
        """Return what may be in flight."""
        return LimitSettings(
            max_requests_per_project=self.max_calls_per_project,
            max_bytes_per_project=self.max_bytes_per_project,
            max_requests=self.max_calls,
            max_bytes=self.max_bytes,
        )


def check_address(setting: str, address: str) -> None:
    """Raise ConfigError unless an address to listen on is `host:port`."""
    port = address.rpartition(":")[2]
    if not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{setting} must be host:port, got {address!r}")
    if int(port) > _MAX_PORT:
        raise ConfigError(f"{setting} {address} has no such port; choose 1 to {_MAX_PORT}, or 0")


class PodServer:
    """A gRPC server with everything that is the same in every pod.

    Args:
        config: Listening and shutdown settings.
        domain: The `ErrorInfo.domain`, such as `trainer.tinsmith`.
        authenticator: Finds the caller of each call.
    """

    def __init__(self, config: ServerConfig, *, domain: str, authenticator: Authenticator) -> None:
        self._config = config
        self._interceptor = CallInterceptor(
            domain=domain,
            authenticator=authenticator,
            limits=Limits(config.limits()),
            reader=BodyReader(config.max_reads, deadline_s=config.read_timeout_s),
        )
        self._server = grpc.aio.server(
            interceptors=[self._interceptor], options=server_options(config)
        )
        self._health = Health()
        self._server.add_generic_rpc_handlers((self._health,))
        self._metrics: MetricsServer | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """`host:port` that the server listens on; empty before `start`."""
        return self._address

    @property
    def metrics_address(self) -> str:
        """`host:port` of the Prometheus endpoint; empty if there is none."""
        return self._metrics.address if self._metrics else ""

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        """Add a service with the `add_..._to_server` function that was generated for it."""
        register(servicer, self._server)

    def bind(self) -> str:
        """Reserve the port and return the address, before anything is served.

        Raises:
            ConfigError: If the address cannot be bound.
        """
        if self._address:
            return self._address
        host, _, _ = self._config.listen_address.rpartition(":")
        try:
            port = self._add_port()
        except RuntimeError as error:
            raise ConfigError(
                f"listen_address {self._config.listen_address} cannot be bound: is another "
                "process using the port?"
            ) from error
        self._address = f"{host}:{port}"
        return self._address

    def _add_port(self) -> int:
        if self._config.tls is None:
            return self._server.add_insecure_port(self._config.listen_address)
        return self._server.add_secure_port(
            self._config.listen_address, self._config.tls.server_credentials()
        )

    async def start(self) -> None:
        """Serve, and report healthy."""
        self.bind()
        if self._config.metrics_address is not None:
            self._metrics = MetricsServer.start(
                self._config.metrics_address, lambda: self._health.is_serving
            )
        await self._server.start()
        await self._health.report(is_serving=True)
        logger.info("serving", extra={"address": self._address})

    async def report_unhealthy(self) -> None:
        """Answer health checks with NOT_SERVING from now on, although calls are still answered."""
        await self._health.report(is_serving=False)

    async def stop(self) -> None:
        """Report unhealthy, refuse new calls, let running ones finish, close."""
        self._interceptor.drain()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace=self._config.drain_timeout_s)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
            self._metrics = None
        logger.info("stopped", extra={"address": self._address})


async def wait_for_signal() -> None:
    """Return at the first SIGTERM or SIGINT of the process."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await stopped.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


_MAX_PENDING_CALLS = 100_000
_MAX_PENDING_S = 120


def server_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Return the options of gRPC that every server of ours has."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.keepalive_time_ms", int(config.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.handshake_timeout_s * 1000)),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            int(config.min_ping_interval_s * 1000),
        ),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", int(config.handshake_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", int(config.max_connection_idle_s * 1000)),
        ("grpc.max_connection_age_ms", int(config.max_connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", int(config.connection_grace_s * 1000)),
        # Beyond these gRPC drops calls with CANCELLED, which says nothing. Limits are ours: a
        # call that is too much is refused with its reason and a time to come again.
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_S),
        # Two servers on one port would split the traffic silently.
        ("grpc.so_reuseport", 0),
    ]
