"""Which clients are there: an instance whose client has gone is not waited for.

A client is there while it has a stream of steps open. The kernel closes the connections of a
process that dies, so that its instances need not live until they expire. A client that never had a
stream is not watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

ClientKey = tuple[str, str]
"""Project and id of a client."""


class Clients:
    """The clients of all projects.

    Args:
        grace_s: How long a client may be without a stream.
        clock: Monotonic seconds.
    """

    def __init__(self, grace_s: float, clock: Callable[[], float]) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._num_streams: dict[ClientKey, int] = {}
        self._left_s: dict[ClientKey, float] = {}

    @contextmanager
    def present(self, key: ClientKey) -> Iterator[None]:
        """Take a client for there until the context ends."""
        self._num_streams[key] = self._num_streams.get(key, 0) + 1
        self._left_s.pop(key, None)
        try:
            yield
        finally:
            self._num_streams[key] -= 1
            if not self._num_streams[key]:
                del self._num_streams[key]
                self._left_s[key] = self._clock()

    def take_gone(self) -> set[ClientKey]:
        """Return the clients that have left for good, each of them once."""
        limit_s = self._clock() - self._grace_s
        gone = {key for key, left_s in self._left_s.items() if left_s <= limit_s}
        for key in gone:
            del self._left_s[key]
        return gone
