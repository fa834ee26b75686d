"""One TCP port for HTTP/1.1 and gRPC, in the clear or with TLS.

The first bytes of a connection tell: HTTP/2 begins with a fixed preface. Its bytes are spliced to
the gRPC server on its Unix socket; everything else becomes a connection of the HTTP server, in this
process. With TLS the server prefers HTTP/1.1 in the negotiation (ALPN): HTTP clients that know both
get the HTTP server. gRPC offers HTTP/2 alone and gets that.

A connection is unknown until a good key was shown on it. Of too many unknown ones, the oldest of
the address that has most is dropped: half-open connections shut no other address out. The gRPC
server learns the address of a connection by the name of the socket that its bytes come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import secrets
import socket
import ssl
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith_gateway.metrics import CONNECTIONS, REFUSED_CONNECTIONS
from tinsmith_gateway.serving.http_server import HttpServer
from tinsmith_gateway.serving.splice import PREFACE, ClientPipe, Pipe
from tinsmith_gateway.serving.stream_limits import StreamLimits
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.observability.certificates import note_certificate
from tinsmith_runtime.rpc.peers import join_address, network_of

logger = logging.getLogger(__name__)

_BACKLOG, _ACCEPTED_AT_ONCE = 2048, 32
# Its own socket, and both ends of that to the gRPC server.
_FILES_PER_CONNECTION, _OTHER_FILES = 3, 512


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontSettings:
    """Bounds of connections, before the caller is known.

    Attributes:
        max_connections: More are dropped at once.
        max_unknown: Connections without a good key; of more the oldest is dropped.
        handshake_timeout_s: Time for TLS, and again for the first bytes.
        tls: Certificate and key; None serves in the clear.
    """

    max_connections: int
    max_unknown: int
    handshake_timeout_s: float
    tls: ssl.SSLContext | None = None


def load_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the settings of a TLS server.

    Raises:
        ConfigError: If a file cannot be read or they do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls_certificate {certificate} with tls_key {key} cannot be used: {error}"
        ) from error
    note_certificate("front", certificate.read_text())
    context.set_alpn_protocols(["http/1.1", "h2"])
    return context


def bind(address: str) -> socket.socket:
    """Reserve a port; connections are refused until a front listens on it.

    Raises:
        ConfigError: If it cannot be bound.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only where the protocol is named: without it every small
    # answer waits 40 ms for an acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if int(port):
            # A restart takes the port at once. A free one must not be shared before it listens.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host.strip("[]"), int(port)))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"listen_address {address} cannot be bound: is another process using the port?"
        ) from error
    return bound


def raise_file_limit(wanted: int) -> None:
    """Let this process open so many files, or as many as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


class Front:
    """Accepts connections and hands them on.

    Args:
        settings: Bounds.
        http: Takes what is not HTTP/2.
        native_socket: Path of the gRPC server's socket.
    """

    def __init__(self, settings: FrontSettings, http: HttpServer, native_socket: Path) -> None:
        self.settings = settings
        self.http = http
        self.native_socket = native_socket
        self.tasks: set[asyncio.Task[None]] = set()
        self._open: set[_Connection] = set()
        # By network and address, each in the order of arrival.
        self._unknown: dict[str, dict[str, _Connection]] = {}
        self._num_unknown = 0
        self.streams = StreamLimits()
        self._token = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._open)

    async def start(self, listener: socket.socket) -> None:
        """Accept connections."""
        raise_file_limit(_FILES_PER_CONNECTION * self.settings.max_connections + _OTHER_FILES)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), sock=listener, backlog=_ACCEPTED_AT_ONCE
        )
        # asyncio takes all that wait at once, up to the backlog; a crowd would hold up the rest.
        listener.listen(_BACKLOG)

    def stop_accepting(self) -> None:
        """Refuse new connections, and drop those that have not said what they are."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._open):
            connection.drop_unknown()

    async def close(self) -> None:
        """Cut what is still open."""
        self.stop_accepting()
        for connection in list(self._open):
            connection.abort()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def admit(self, connection: _Connection) -> bool:
        """Count a connection; return whether there is room for it."""
        if len(self._open) >= self.settings.max_connections:
            return False
        self._open.add(connection)
        of_network = self._unknown.setdefault(network_of(connection.address), {})
        self._num_unknown += connection.address not in of_network
        of_network[connection.address] = connection
        if self._num_unknown > self.settings.max_unknown:
            REFUSED_CONNECTIONS.labels("too_many_unknown").inc()
            most = max(self._unknown.values(), key=len)
            next(iter(most.values())).abort()
        return True

    def know(self, address: str) -> None:
        """Take note that a good key was shown on the connection of an address."""
        network = network_of(address)
        of_network = self._unknown.get(network, {})
        if of_network.pop(address, None) is not None:
            self._num_unknown -= 1
            if not of_network:
                del self._unknown[network]

    def is_known(self, address: str) -> bool:
        """Return whether a good key was shown on the connection of an address."""
        return address not in self._unknown.get(network_of(address), {})

    def release(self, connection: _Connection) -> None:
        """Take a connection off the count; repeating it changes nothing."""
        self._open.discard(connection)
        of_network = self._unknown.get(network_of(connection.address), {})
        # A new connection may have its address by now.
        if of_network.get(connection.address) is connection:
            self.know(connection.address)

    def name_socket(self, near: socket.socket, address: str) -> None:
        """Tell the gRPC server, by the name of a socket, which address its bytes come from."""
        # Other systems have no names without files; there, addresses of native calls are unknown.
        if sys.platform == "linux":
            near.bind(f"\0tinsmith/{self._token}/{next(self._numbers)}/{address}".encode())


class _Connection(asyncio.Protocol):
    """A connection until it is known what it speaks."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._received = bytearray()
        self._socket: asyncio.Transport | None = None
        # With TLS, that of the plain text; None while the handshake goes on.
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._protocol = ""
        self._is_lost = False
        self.address = ""
        """`host:port` of the client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # One that is gone already has no name.
        self.address = join_address(*(transport.get_extra_info("peername") or ("", id(self)))[:2])
        if not self._front.admit(self):
            REFUSED_CONNECTIONS.labels("too_many").inc()
            transport.abort()
            return
        self._socket = transport
        tls = self._front.settings.tls
        if tls is None:
            self._begin(transport)
            return
        # Nothing may be read before the handshake has taken over.
        transport.pause_reading()
        self._spawn(self._secure(transport, tls))

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._look()

    def eof_received(self) -> bool:
        # No request can be served before the first bytes.
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.end()

    def drop_unknown(self) -> None:
        """Cut a connection that has not said what it is."""
        if not self._protocol:
            self.abort()

    @property
    def is_known(self) -> bool:
        """Whether a good key was shown on it."""
        return not self._is_lost and self._front.is_known(self.address)

    def abort(self) -> None:
        """Cut the connection."""
        if self._socket is not None:
            self._socket.abort()
        self.end()

    async def _secure(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        timeout_s = self._front.settings.handshake_timeout_s
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=timeout_s
            )
        except OSError:
            REFUSED_CONNECTIONS.labels("handshake").inc()
            self.abort()
            return
        if secure is None or self._is_lost:
            self.abort()
            return
        self._begin(secure)
        self._look()

    def _begin(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        loop = asyncio.get_running_loop()
        timeout_s = self._front.settings.handshake_timeout_s
        self._deadline = loop.call_later(timeout_s, self._end_slow)

    def _look(self) -> None:
        """Hand the connection on as soon as its first bytes tell what it is."""
        if self._transport is None or self._protocol or self._is_lost or not self._received:
            return
        size = min(len(self._received), len(PREFACE))
        if self._received[:size] != PREFACE[:size]:
            self._decide("http")
            self._front.http.take(self._transport, bytes(self._received), self.end)
        elif size == len(PREFACE):
            self._decide("grpc")
            self._transport.pause_reading()
            self._spawn(self._splice(self._transport))

    async def _splice(self, transport: asyncio.Transport) -> None:
        near, far = ClientPipe(self._front.streams, self), Pipe()
        try:
            far_transport = await self._connect(far)
        except OSError:
            logger.warning("the gRPC server behind the front does not answer")
            self.abort()
            return
        near.join(transport, far)
        far.join(far_transport, near)
        if self._is_lost:
            far_transport.abort()
            return
        transport.set_protocol(near)
        far_transport.resume_reading()
        near.begin(bytes(self._received))
        self._received.clear()

    async def _connect(self, far: Pipe) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            opened.setblocking(False)
            self._front.name_socket(opened, self.address)
            await loop.sock_connect(opened, str(self._front.native_socket))
            transport, _ = await loop.create_unix_connection(lambda: far, sock=opened)
            stack.pop_all()
        return transport

    def _decide(self, protocol: str) -> None:
        self._protocol = protocol
        CONNECTIONS.labels(protocol).inc()
        if self._deadline is not None:
            self._deadline.cancel()

    def _end_slow(self) -> None:
        REFUSED_CONNECTIONS.labels("slow_first_bytes").inc()
        self.abort()

    def end(self) -> None:
        """Take note that it is gone; repeating it changes nothing."""
        if self._is_lost:
            return
        self._is_lost = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._protocol:
            CONNECTIONS.labels(self._protocol).dec()
        self._front.release(self)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._front.tasks.add(task)
        task.add_done_callback(self._front.tasks.discard)
