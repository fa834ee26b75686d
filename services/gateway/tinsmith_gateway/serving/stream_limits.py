"""How many HTTP/2 streams a connection may open and reset, counted in the bytes that pass.

A stream costs the gRPC server about as much when it is reset at once as when it is answered, and
its sender nothing (CVE-2023-44487). So streams are counted before they reach that server. What an
address opens before it has shown a good key is passed on no faster than it can be refused. Of
resets there are few in good use; a connection with more is cut, and its client comes anew. Frames
of whatever kind are counted too: they cost time here, and empty ones have nine bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tinsmith_runtime.fairness.token_buckets import TokenBuckets
from tinsmith_runtime.rpc.peers import network_of

STRANGERS_STREAMS_AT_ONCE = 2048
"""Streams that an address may open at once before it has shown a good key."""
STRANGERS_STREAMS_PER_S = 500.0
"""How many of them it gets back in a second; more wait to be read."""
STRANGERS_RESETS_AT_ONCE = 100
"""Streams that an address may reset at once before it has shown a good key."""
STRANGERS_RESETS_PER_S = 10.0
"""How many of them it gets back in a second; with more a connection is cut."""
RESETS_AT_ONCE = 4096
"""Streams that a connection may reset at once behind a good key, as many as there may be."""
RESETS_PER_S = 200.0
"""How many of them it gets back in a second; with more a connection is cut."""
STRANGERS_FRAMES_AT_ONCE = 16_384
"""Frames that an address may send at once before it has shown a good key."""
STRANGERS_FRAMES_PER_S = 4096.0
"""How many of them it gets back in a second; more wait to be read."""
FRAMES_AT_ONCE = 32_768
"""Frames that a connection may send at once behind a good key: half a GiB in full ones."""
FRAMES_PER_S = 16_384.0
"""How many of them it gets back in a second, 256 MiB in full ones; more wait to be read."""

_HEAD_BYTES = 9
_HEADERS, _RST_STREAM = 1, 3


@dataclass(slots=True)
class Passed:
    """What may be passed on of bytes that came."""

    num_bytes: int = 0
    num_frames: int = 0
    num_opened: int = 0
    """Streams."""
    num_reset: int = 0
    """Streams."""


class FrameMeter:
    """Counts the frames of a connection, and those that open and reset streams (RFC 9113, 4.1).

    What it is fed begins behind the preface.
    """

    def __init__(self) -> None:
        self._num_to_skip = 0
        self._head = b""

    def feed(self, data: bytes | bytearray, max_opened: float, max_frames: float) -> Passed:
        """Take the bytes that come next, up to a frame that would be, or open, one too many."""
        passed = Passed()
        position, end = 0, len(data)
        while True:
            step = min(self._num_to_skip, end - position)
            self._num_to_skip -= step
            position += step
            head_end = position + _HEAD_BYTES - len(self._head)
            head = self._head + data[position:head_end]
            if len(head) < _HEAD_BYTES:
                self._head = head
                passed.num_bytes = end
                return passed
            is_opening = head[3] == _HEADERS
            if passed.num_frames >= max_frames or (is_opening and passed.num_opened >= max_opened):
                passed.num_bytes = position
                return passed
            passed.num_frames += 1
            passed.num_opened += is_opening
            passed.num_reset += head[3] == _RST_STREAM
            self._num_to_skip = int.from_bytes(head[:3], "big")
            self._head = b""
            position = head_end


class StreamLimits:
    """What addresses have opened and reset; an IPv6 network of 64 bits is one address.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams = TokenBuckets(
            STRANGERS_STREAMS_AT_ONCE, STRANGERS_STREAMS_PER_S, clock=clock
        )
        self._strangers_resets = TokenBuckets(
            STRANGERS_RESETS_AT_ONCE, STRANGERS_RESETS_PER_S, clock=clock
        )
        self._resets = TokenBuckets(RESETS_AT_ONCE, RESETS_PER_S, clock=clock)
        self._strangers_frames = TokenBuckets(
            STRANGERS_FRAMES_AT_ONCE, STRANGERS_FRAMES_PER_S, clock=clock
        )
        self._frames = TokenBuckets(FRAMES_AT_ONCE, FRAMES_PER_S, clock=clock)

    def take_resets(self, address: str, number: int, *, is_known: bool) -> bool:
        """Count streams that were reset; return whether there may be so many.

        Args:
            address: `host:port` of the client.
            number: How many.
            is_known: Whether a good key was shown on the connection.
        """
        if is_known:
            # Of the connection alone: callers behind one balancer pay for no other.
            return not self._resets.take(address, number)
        return not self._strangers_resets.take(network_of(address), number)

    def num_openable(self, address: str) -> int:
        """Return how many streams an address may open now without a good key."""
        return int(self._streams.num_left(network_of(address)))

    def num_sendable(self, address: str, *, is_known: bool) -> int:
        """Return how many frames a connection may send now; see `take_resets`."""
        if is_known:
            return int(self._frames.num_left(address))
        return int(self._strangers_frames.num_left(network_of(address)))

    def take(self, address: str, passed: Passed, *, is_known: bool) -> None:
        """Count the frames, and the streams opened without a good key, of what is passed on."""
        if is_known:
            self._frames.take(address, passed.num_frames)
            return
        network = network_of(address)
        self._strangers_frames.take(network, passed.num_frames)
        self._streams.take(network, passed.num_opened)
