"""How many HTTP/2 streams a connection may open and reset, counted in the bytes that pass.

A stream costs the gRPC server about as much when it is reset at once as when it is answered, and
its sender nothing (CVE-2023-44487). So streams are counted before they reach that server. What an
address opens before it has shown a good key is passed on no faster than it can be refused. Of
resets there are few in good use; a connection with more is cut, and its client comes anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tinsmith_runtime.rpc.peers import network_of
from tinsmith_runtime.token_buckets import TokenBuckets

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

_HEAD_BYTES = 9
_HEADERS, _RST_STREAM = 1, 3


class FrameMeter:
    """Counts the frames of a connection that open and reset streams (RFC 9113, section 4.1).

    What it is fed begins behind the preface.
    """

    def __init__(self) -> None:
        self._num_to_skip = 0
        self._head = b""

    def feed(self, data: bytes | bytearray, max_opened: float) -> tuple[int, int, int]:
        """Take the bytes that come next, up to a frame that would open one stream too many.

        Returns:
            How many bytes were taken, how many streams they open, and how many they reset.
        """
        num_opened = num_reset = position = 0
        end = len(data)
        while True:
            step = min(self._num_to_skip, end - position)
            self._num_to_skip -= step
            position += step
            head_end = position + _HEAD_BYTES - len(self._head)
            head = self._head + data[position:head_end]
            if len(head) < _HEAD_BYTES:
                self._head = head
                return end, num_opened, num_reset
            if head[3] == _HEADERS:
                if num_opened >= max_opened:
                    return position, num_opened, num_reset
                num_opened += 1
            elif head[3] == _RST_STREAM:
                num_reset += 1
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

    def take_opened(self, address: str, number: int) -> None:
        """Count streams that were opened without a good key."""
        self._streams.take(network_of(address), number)
