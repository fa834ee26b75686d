"""The two ends of a connection that is spliced to the gRPC server.

Neither end is read while the other cannot be written, so a slow reader holds up its sender and no
memory. What a client sends is passed on as fast as `stream_limits.py` allows.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Protocol

from tinsmith_gateway.metrics import REFUSED_CONNECTIONS
from tinsmith_gateway.serving.stream_limits import FrameMeter, StreamLimits

logger = logging.getLogger(__name__)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""How every HTTP/2 connection begins (RFC 9113, section 3.4)."""
_HOLD_S = 0.05
"""The pause before a connection that sent too much is looked at again."""
_FREE_FRAMES = 64
"""Frames of a new connection that get through whatever its neighbours do."""


class Client(Protocol):
    """The connection that a client made."""

    @property
    def address(self) -> str:
        """`host:port` of the client."""

    @property
    def is_known(self) -> bool:
        """Whether a good key was shown on it."""

    def abort(self) -> None:
        """Cut it."""

    def end(self) -> None:
        """Take note that it is gone."""


class Pipe(asyncio.Protocol):
    """One end of a spliced connection: what arrives here leaves at the other end."""

    _may_half_close = False
    """Whether the other side may have more to say after this one has ended. A client may; a server
    that ended has closed."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._other: Pipe
        self._is_other_full = False

    def join(self, transport: asyncio.Transport, other: Pipe) -> None:
        """Learn both ends."""
        self._transport = transport
        self._other = other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait to be joined."""
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        self._other._transport.write(data)

    def pause_writing(self) -> None:
        """Stop reading at the other end."""
        self._other._is_other_full = True
        self._other.choose_reading()

    def resume_writing(self) -> None:
        """Read at the other end again."""
        self._other._is_other_full = False
        self._other.choose_reading()

    def choose_reading(self) -> None:
        """Read on, unless what was read cannot be passed on."""
        if self._is_other_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """Tell the other end; return whether this one stays open to be written."""
        other = self._other._transport
        if not self._may_half_close or not other.can_write_eof():
            return False
        other.write_eof()
        return self._transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other end."""
        if exc is None:
            self._other._transport.close()
        else:
            self._other._transport.abort()


class ClientPipe(Pipe):
    """The end of the client, whose streams are counted."""

    _may_half_close = True

    def __init__(self, limits: StreamLimits, client: Client) -> None:
        super().__init__()
        self._limits = limits
        self._client = client
        self._meter = FrameMeter()
        self._held = b""
        self._num_free_streams, self._num_free_frames = 1, _FREE_FRAMES
        self._is_known = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, received: bytes) -> None:
        """Pass on what was received so far, which begins with the preface, and read on."""
        self._other._transport.write(PREFACE)
        self.data_received(received[len(PREFACE) :])
        self.choose_reading()

    def data_received(self, data: bytes) -> None:
        """Pass it on as far as streams may be opened; cut what resets too many."""
        if self._held:
            # A transport may have more than it was asked for (TLS) after it was paused.
            self._held += data
            return
        # Once it is known it stays so, and need not be looked up with each piece of an upload.
        is_known = self._is_known = self._is_known or self._client.is_known
        address = self._client.address
        openable = math.inf
        if not is_known:
            # A first one, with a good key, must get through whatever its neighbours do.
            openable = max(self._limits.num_openable(address), self._num_free_streams)
        sendable = self._limits.num_sendable(address, is_known=is_known)
        passed = self._meter.feed(data, openable, max(sendable, self._num_free_frames))
        if passed.num_reset and not self._limits.take_resets(
            address, passed.num_reset, is_known=is_known
        ):
            REFUSED_CONNECTIONS.labels("too_many_resets").inc()
            logger.warning(
                "a connection was cut that reset too many streams", extra={"address": address}
            )
            self._client.abort()
            return
        self._limits.take(address, passed, is_known=is_known)
        self._num_free_streams = max(self._num_free_streams - passed.num_opened, 0)
        self._num_free_frames = max(self._num_free_frames - passed.num_frames, 0)
        num_taken = passed.num_bytes
        self._other._transport.write(data if num_taken == len(data) else data[:num_taken])
        if num_taken < len(data):
            self._held = data[num_taken:]
            self._timer = asyncio.get_running_loop().call_later(_HOLD_S, self._go_on)
            self.choose_reading()

    def choose_reading(self) -> None:
        """Read on, unless something is held."""
        if self._held:
            self._transport.pause_reading()
        else:
            super().choose_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other end."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        self._client.end()

    def _go_on(self) -> None:
        held, self._held = self._held, b""
        self.data_received(held)
        self.choose_reading()
