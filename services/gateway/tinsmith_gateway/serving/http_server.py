"""HTTP/1.1 by uvicorn, on connections that the front accepted.

uvicorn reads a head of any length for any time, and keeps trailers of any length. Here they are
bounded, before the caller is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinsmith_gateway.metrics import REFUSED_CONNECTIONS

_KEEP_ALIVE_S = 75
"""Longer than clients keep unused connections: the one that closes first must be the client, or
its next request may meet a connection that is just being closed."""
_LINE_BYTES = len(b": \r\n")
_TURNS_OF_AN_ACCEPT = 8
_CUT_TIMEOUT_S = 1.0


def _refusal(status: str, problem: str) -> bytes:
    """Return an answer; with a body, since clients take a bare 400 for the fault of a proxy."""
    body = json.dumps({"error": problem, "detail": problem})
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}"
    ).encode()


_TOO_LARGE = _refusal("431 Request Header Fields Too Large", "the head of the request is too large")
_MALFORMED = _refusal("400 Bad Request", "the request is not HTTP/1.1")


class HttpServer:
    """An application behind connections that come from elsewhere.

    Args:
        app: The ASGI application.
        drain_timeout_s: Time that running requests get at the end.
        head_timeout_s: Time for the head of a request.
        max_head_bytes: Its size.
    """

    def __init__(
        self, app: Any, *, drain_timeout_s: float, head_timeout_s: float, max_head_bytes: int
    ) -> None:
        self._config = uvicorn.Config(
            app,
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            # What strangers send is counted, not logged line by line.
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(self._config)
        self._drain_timeout_s = drain_timeout_s
        self._head_timeout_s = head_timeout_s
        self._max_head_bytes = max_head_bytes
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Get ready for connections."""
        self._config.load()
        self._server.lifespan = self._config.lifespan_class(self._config)
        await self._server.startup(sockets=[])
        self._ticking = asyncio.create_task(self._server.main_loop())

    def take(
        self, transport: asyncio.Transport, received: bytes, on_lost: Callable[[], None]
    ) -> None:
        """Serve a connection.

        Args:
            transport: The connection.
            received: What was read from it so far.
            on_lost: Called when it is closed.
        """
        protocol = _BoundedHttp(
            self._config,
            self._server,
            on_lost=on_lost,
            head_timeout_s=self._head_timeout_s,
            max_head_bytes=self._max_head_bytes,
        )
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(received)

    async def stop(self) -> None:
        """Close idle connections, let running requests finish, then cut them."""
        if self._ticking is None:
            return
        # Cancelled, since it looks every tenth of a second whether it is to end.
        self._ticking.cancel()
        await asyncio.wait([self._ticking])
        if not self._ticking.cancelled():
            self._ticking.result()
        # What was accepted before is handed over within a few turns of the loop.
        for _ in range(_TURNS_OF_AN_ACCEPT):
            await asyncio.sleep(0)
        state = self._server.server_state
        if state.connections or state.tasks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_timeout_s):
                    await self._server.shutdown(sockets=[])
        cut = list(state.tasks)
        for task in cut:
            task.cancel()
        if cut:
            # What is cut still says so.
            await asyncio.wait(cut, timeout=_CUT_TIMEOUT_S)
        self._ticking = None


class _HeadTooLargeError(Exception):
    """The head of a request is too large."""


class _BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with a bound on the size and time of the head of a request."""

    def __init__(
        self,
        config: uvicorn.Config,
        server: uvicorn.Server,
        *,
        on_lost: Callable[[], None],
        head_timeout_s: float,
        max_head_bytes: int,
    ) -> None:
        super().__init__(config, server.server_state, server.lifespan.state)
        self._on_lost = on_lost
        self._head_timeout_s = head_timeout_s
        self._max_head_bytes = max_head_bytes
        self._is_head = True
        self._is_too_large = False
        self._num_head_bytes = 0
        self._has_body = False
        self._num_other_bytes = 0
        """Since the last piece of a body: trailers, and what surrounds chunks."""
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Parse, and bound what is no complete head yet."""
        if self._is_head:
            if self._timer is None:
                self._timer = self.loop.call_later(self._head_timeout_s, self._end_slow)
            self._num_head_bytes += len(data)
        self._has_body = False
        super().data_received(data)
        if self._is_head:
            if self._num_head_bytes > self._max_head_bytes:
                self._end_large()
        elif self._has_body:
            self._num_other_bytes = 0
        else:
            self._num_other_bytes += len(data)
            if self._num_other_bytes > self._max_head_bytes:
                REFUSED_CONNECTIONS.labels("large_trailer").inc()
                self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        self._has_body = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Go on to the body, unless the head that arrived at once was too large."""
        self._stop_timer()
        self._is_head = False
        size = len(self.url) + sum(
            len(key) + len(value) + _LINE_BYTES for key, value in self.headers
        )
        if size > self._max_head_bytes:
            self._is_too_large = True
            raise _HeadTooLargeError
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next head."""
        super().on_message_complete()
        self._is_head = True
        self._num_head_bytes = self._num_other_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed."""
        del msg
        self._stop_timer()
        if self._is_too_large:
            self._end_large()
        elif not self.transport.is_closing():
            REFUSED_CONNECTIONS.labels("malformed").inc()
            self.transport.write(_MALFORMED)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the front know."""
        self._stop_timer()
        super().connection_lost(exc)
        self._on_lost()

    def _end_large(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            REFUSED_CONNECTIONS.labels("large_head").inc()
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _end_slow(self) -> None:
        self._timer = None
        REFUSED_CONNECTIONS.labels("slow_head").inc()
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
