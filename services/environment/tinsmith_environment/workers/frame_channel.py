"""Calls to one process over a socket: frames out, replies in, in the same order.

Calls need not wait for each other: the process takes one at a time, and the time limit of a call
begins when the one before it was answered. A lost process answers nothing any more, so that no
reply can reach the wrong call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

from tinsmith_environment.workers import protocol


class ChannelClosedError(Exception):
    """The process is gone, or is to be stopped, and answers nothing any more."""


class FrameChannel(asyncio.Protocol):
    """The pod's end of the socket.

    Args:
        max_reply_bytes: Of one reply.
        on_overdue: Called when a reply does not come in time, with what was called and the limit.
        on_malformed: Called when what comes is no reply.
        on_closed: Called when the other end is closed.
    """

    def __init__(
        self,
        *,
        max_reply_bytes: int,
        on_overdue: Callable[[str, float], None],
        on_malformed: Callable[[str], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._max_reply_bytes = max_reply_bytes
        self._on_overdue = on_overdue
        self._on_malformed = on_malformed
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._calls: deque[_Call] = deque()
        self._begin_s = 0.0
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what frames are written to."""
        self._transport = cast(asyncio.Transport, transport)

    def call(self, frame: bytes, timeout_s: float, what: str) -> asyncio.Future[bytes]:
        """Send a request; the future is of the body of its reply.

        It fails with `ChannelClosedError` when the channel is closed. An empty frame asks nothing:
        the process says of its own accord that it has started.
        """
        call = _Call(self._loop.create_future(), timeout_s, what)
        if self._is_closed:
            call.reply.set_exception(ChannelClosedError())
            return call.reply
        self._calls.append(call)
        if frame and self._transport is not None:
            self._transport.write(frame)
        if len(self._calls) == 1:
            self._begin_s = self._loop.time()
            self._watch()
        return call.reply

    def data_received(self, data: bytes) -> None:
        """Answer the calls whose replies are complete."""
        self._received += data
        while len(self._received) >= protocol.HEADER.size:
            try:
                length = protocol.decode_length(bytes(self._received[: protocol.HEADER.size]))
            except protocol.FrameError as error:
                self._on_malformed(str(error))
                return
            if length > self._max_reply_bytes:
                self._on_malformed(f"{length} bytes exceed the limit of {self._max_reply_bytes}")
                return
            end = protocol.HEADER.size + length
            if len(self._received) < end:
                return
            if not self._calls:
                self._on_malformed("it answers what it was not asked")
                return
            body = bytes(self._received[protocol.HEADER.size : end])
            del self._received[:end]
            self._begin_s = self._loop.time()
            reply = self._calls.popleft().reply
            if not reply.done():
                reply.set_result(body)
            self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the process has closed its end."""
        del error
        self.close()
        self._on_closed()

    def close(self) -> None:
        """Take no more replies; what waits for one fails."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        while self._calls:
            reply = self._calls.popleft().reply
            if not reply.done():
                reply.set_exception(ChannelClosedError())
        self._received.clear()

    def _watch(self) -> None:
        """See to it that a look is taken when the first call is overdue."""
        if not self._calls:
            return
        at_s = self._begin_s + self._calls[0].timeout_s
        # One timer, which looks again, is cheaper than one for each call.
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._calls and self._loop.time() >= self._begin_s + self._calls[0].timeout_s:
            self._on_overdue(self._calls[0].what, self._calls[0].timeout_s)
        else:
            self._watch()


class _Call:
    """What is waited for."""

    __slots__ = ("reply", "timeout_s", "what")

    def __init__(self, reply: asyncio.Future[bytes], timeout_s: float, what: str) -> None:
        self.reply = reply
        self.timeout_s = timeout_s
        self.what = what
