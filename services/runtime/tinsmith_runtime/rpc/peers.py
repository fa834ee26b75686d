"""The address of the party at the other end of a call: a context variable, like the caller.

It is what there is to tell strangers apart before a key is known. A proxy in front makes all of its
clients one address; headers that name another one are not believed, since any client may write
them.
"""

from __future__ import annotations

import ipaddress
from contextvars import ContextVar
from urllib.parse import unquote

_IPV6_PREFIX = 64
"""One subscriber has a whole network of this size, and may change its address at will."""

_peer: ContextVar[str] = ContextVar("tinsmith_peer", default="")


def current_peer() -> str:
    """Return the `host:port` of the call that is being served; empty where it is not known."""
    return _peer.get()


def bind_peer(address: str) -> None:
    """Set the `host:port` of the current task; what serves a call does this."""
    _peer.set(address)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with the brackets of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(peer: str) -> str:
    """Return the `host:port` in what gRPC calls a peer; empty for a socket without an address.

    A proxy on the same machine names the address as the last part of its abstract Unix socket.
    """
    scheme, _, rest = peer.partition(":")
    if scheme in ("ipv4", "ipv6"):
        return unquote(rest)
    if scheme == "unix-abstract":
        return unquote(rest).rpartition("/")[2]
    return ""


def network_of(address: str) -> str:
    """Return the host of a `host:port`, or the network of an IPv6 one."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(parsed), _IPV6_PREFIX), strict=False))
    return str(parsed)
