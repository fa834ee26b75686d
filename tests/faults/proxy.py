"""A proxy on loopback that does to connections what networks do, when a test says so.

`FaultProxy` carries any TCP protocol (SQL, gRPC, HTTP); its faults strike whole connections.
`HttpFaultProxy` carries one HTTP request by connection, so that its faults can choose requests.
Every socket has a deadline and every thread ends with the proxy.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Request:
    """The first line of an HTTP request, and its headers by lower-case name."""

    method: str
    target: str
    headers: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to connections, or to HTTP requests; without settings, nothing.

    Attributes:
        refuse: Resets what comes in, before anything is forwarded.
        stall: Accepts, and neither forwards nor answers until the connection is dropped.
        delay_s: Waits before anything is forwarded.
        cut_request_after: Forwards so many bytes to the server, then resets both sides.
        cut_response_after: Forwards so many bytes of the answer, then closes both sides. 0 waits
            until the server begins to answer: it did what was asked and the client is not told.
        damage_response_at: Flips a bit of this byte of the answer.
        status: HTTP only: answers with this status instead of the server.
        code: HTTP only: error code in the body of that answer, as S3 writes it.
        matches: HTTP only: which requests.
        times: How often it strikes; None for always.
    """

    refuse: bool = False
    stall: bool = False
    delay_s: float = 0.0
    cut_request_after: int | None = None
    cut_response_after: int | None = None
    damage_response_at: int | None = None
    status: int | None = None
    code: str = "SlowDown"
    matches: Callable[[Request], bool] = field(default=lambda _: True)
    times: int | None = None


class FaultProxy:
    """Forwards connections to a server.

    Args:
        target_host: Where the server listens.
        target_port: Where the server listens.
        timeout_s: After which a silent connection is dropped.
    """

    def __init__(self, target_host: str, target_port: int, *, timeout_s: float = 60.0) -> None:
        self._target = (target_host, target_port)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._faults: list[tuple[Fault, list[int]]] = []
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._is_closing = threading.Event()
        self._dropped = threading.Event()
        self.num_connections = 0
        """Connections that came in so far."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.settimeout(_POLL_S)
        self._start(self._accept)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return int(self._listener.getsockname()[1])

    @property
    def address(self) -> str:
        """`host:port` that clients connect to."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, fault: Fault) -> None:
        """Have a fault strike from now on; of several that match the first one does."""
        with self._lock:
            self._faults.append((fault, [0]))

    def clear(self) -> None:
        """Forget all faults; connections that stall are dropped."""
        with self._lock:
            self._faults.clear()
            stalled, self._dropped = self._dropped, threading.Event()
        stalled.set()

    def drop_connections(self) -> None:
        """Reset all connections that are open."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            reset(connection)

    @contextlib.contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """Have only this fault strike within; connections that were open are reset first."""
        self.clear()
        self.add(fault)
        self.drop_connections()
        try:
            yield
        finally:
            self.clear()

    def outage(self) -> contextlib.AbstractContextManager[None]:
        """Reset every connection within."""
        return self.fault(Fault(refuse=True))

    def close(self) -> None:
        """Drop everything and wait for the threads."""
        self._is_closing.set()
        self.clear()
        self.drop_connections()
        self._listener.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(10.0)

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self.num_connections += 1
            self._start(lambda client=client: self.serve(client))

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="fault-proxy", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()
        return thread

    def serve(self, client: socket.socket) -> None:
        """Do what is to be done with a connection that came in, in a thread of its own."""
        with self._held(client), contextlib.suppress(OSError):
            fault, dropped = self.next_fault(None)
            if not self._passes(client, fault, dropped):
                return
            with self.connect_to_server() as server, self._held(server):
                back = self._start(
                    lambda: self._pump(
                        server,
                        client,
                        fault.cut_response_after,
                        is_answer=True,
                        damaged=fault.damage_response_at,
                    )
                )
                self._pump(client, server, fault.cut_request_after, is_answer=False)
                back.join(self._timeout_s)

    def connect_to_server(self) -> socket.socket:
        """Return a connection to the server."""
        return socket.create_connection(self._target, timeout=self._timeout_s)

    def _passes(self, client: socket.socket, fault: Fault, dropped: threading.Event) -> bool:
        """Do what comes before anything is forwarded; return whether anything is to be."""
        if fault.refuse:
            reset(client)
            return False
        if fault.stall:
            dropped.wait(self._timeout_s)
            reset(client)
            return False
        if fault.delay_s:
            self._is_closing.wait(fault.delay_s)
        return True

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        limit_bytes: int | None,
        *,
        is_answer: bool,
        damaged: int | None = None,
    ) -> None:
        """Forward until the source ends, or so many bytes went through."""
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if damaged is not None and num_bytes <= damaged < num_bytes + len(data):
                    at = damaged - num_bytes
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                if limit_bytes is not None and num_bytes + len(data) >= limit_bytes:
                    target.sendall(data[: limit_bytes - num_bytes])
                    if is_answer:
                        # What was sent before is to arrive, which a reset would not let it.
                        _shut(target)
                        reset(source)
                    else:
                        reset(source)
                        reset(target)
                    return
                target.sendall(data)
                num_bytes += len(data)
            target.shutdown(socket.SHUT_WR)

    def next_fault(self, request: Request | None) -> tuple[Fault, threading.Event]:
        """Return what strikes a connection or request, and what ends a stall."""
        with self._lock:
            for fault, num_struck in self._faults:
                if fault.times is not None and num_struck[0] >= fault.times:
                    continue
                if request is None or fault.matches(request):
                    num_struck[0] += 1
                    return fault, self._dropped
            return Fault(), self._dropped

    @contextlib.contextmanager
    def _held(self, connection: socket.socket) -> Iterator[None]:
        """Note an open connection, and close it in the end."""
        connection.settimeout(self._timeout_s)
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


class HttpFaultProxy(FaultProxy):
    """Forwards HTTP/1.1 requests, each on a connection of its own."""

    def __init__(self, target_host: str, target_port: int, *, timeout_s: float = 60.0) -> None:
        self.requests: list[Request] = []
        """The requests that came in so far."""
        super().__init__(target_host, target_port, timeout_s=timeout_s)

    @property
    def endpoint(self) -> str:
        """The URL that clients use."""
        return f"http://{self.address}"

    def serve(self, client: socket.socket) -> None:
        """Forward the one request of a connection."""
        with self._held(client), contextlib.suppress(OSError, ValueError):
            head, rest = read_head(client)
            request = _parse_head(head)
            self.requests.append(request)
            fault, dropped = self.next_fault(request)
            if not self._passes(client, fault, dropped):
                return
            length = int(request.headers.get("content-length", "0"))
            if fault.status is not None:
                _swallow(client, length - len(rest))
                client.sendall(_answer(fault.status, fault.code))
                _shut(client)
                return
            with self.connect_to_server() as server, self._held(server):
                if self._forward(client, server, head, rest, length, fault.cut_request_after):
                    self._pump(server, client, fault.cut_response_after, is_answer=True)
                    _shut(client)

    def _forward(
        self,
        client: socket.socket,
        server: socket.socket,
        head: bytes,
        rest: bytes,
        length: int,
        limit_bytes: int | None,
    ) -> bool:
        """Forward one request, or the beginning of its body; return whether it went through."""
        server.sendall(head[:-2] + b"Connection: close\r\n\r\n")
        left_bytes, num_bytes, data = length, 0, rest
        while left_bytes > 0:
            data = data or client.recv(min(_CHUNK_BYTES, left_bytes))
            if not data:
                return False
            if limit_bytes is not None and num_bytes + len(data) >= limit_bytes:
                server.sendall(data[: limit_bytes - num_bytes])
                reset(client)
                reset(server)
                return False
            server.sendall(data)
            num_bytes += len(data)
            left_bytes -= len(data)
            data = b""
        return True


def read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return a request up to the empty line, and what was read of its body."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = connection.recv(_CHUNK_BYTES)
        if not data or len(received) > _MAX_HEAD_BYTES:
            raise ValueError("not a request")
        received += data
    head, _, rest = received.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _parse_head(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Request(method, target, headers)


def _answer(status: int, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>fault</Message></Error>"
    head = (
        f"HTTP/1.1 {status} Fault\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return (head + body).encode()


def _swallow(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes > 0:
        data = connection.recv(min(_CHUNK_BYTES, num_bytes))
        if not data:
            return
        num_bytes -= len(data)


def _shut(connection: socket.socket) -> None:
    """End a connection so that what was sent still arrives."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        deadline_s = time.monotonic() + 1.0
        connection.settimeout(_POLL_S)
        while time.monotonic() < deadline_s and connection.recv(_CHUNK_BYTES):
            pass


def reset(connection: socket.socket) -> None:
    """End a connection at once; the other side sees a reset."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # A shutdown wakes the thread that reads; its close is then the reset.
        connection.shutdown(socket.SHUT_RDWR)
