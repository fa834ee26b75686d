"""Addresses of one cluster: a block 127.x.0.0/16, claimed so that clusters do not meet.

Any address of 127.0.0.0/8 can be bound on Linux without being set up first.
"""

from __future__ import annotations

import itertools
import random
import socket
import threading
from typing import Protocol


class Addresses(Protocol):
    """Where a control plane listens, and what it gives to Services."""

    @property
    def server(self) -> str:
        """The address that the API server listens on."""
        ...

    @property
    def services(self) -> str:
        """The network of Service addresses."""
        ...

    @property
    def first_service(self) -> str:
        """The address of the Service `kubernetes`."""
        ...


class AddressBlock:
    """A block of the loopback network that no other test cluster of this machine uses.

    The first quarter is for Services, the upper half for pods, one address between for nodes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        for octet in random.SystemRandom().sample(range(64, 255), 191):
            # An abstract socket's name is the claim; the kernel drops it when we end.
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0tinsmith-test-cluster-127.{octet}")
            except OSError:
                claim.close()
                continue
            self._claim, self._octet = claim, octet
            return
        raise RuntimeError("every block of 127.0.0.0/8 is used by another test cluster")

    @property
    def server(self) -> str:
        """The address that the API server listens on."""
        return "127.0.0.1"

    @property
    def services(self) -> str:
        """The network of Service addresses."""
        return f"127.{self._octet}.0.0/18"

    @property
    def first_service(self) -> str:
        """The address of the Service `kubernetes`."""
        return f"127.{self._octet}.0.1"

    @property
    def node(self) -> str:
        """The address of every node."""
        return f"127.{self._octet}.64.1"

    def next_pod(self) -> str:
        """Return an address that no pod had before."""
        with self._lock:
            number = next(self._numbers)
        if number >= 1 << 15:
            raise RuntimeError("the block has no address left for a pod")
        return f"127.{self._octet}.{128 + (number >> 8)}.{number & 255}"

    def close(self) -> None:
        """Give the block back."""
        self._claim.close()
