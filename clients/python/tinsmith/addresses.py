"""Addresses of servers: the one form that they are kept in, and whether a proxy stands before them.

gRPC sends calls through the proxy that variables of the machine name. Servers of this machine and
of the cluster are reached without it: a proxy for the internet does not know them.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from tinsmith.errors import ConfigurationError

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Those that gRPC reads, the strongest first; it knows them in small letters alone."""

_EXEMPTING = ("no_grpc_proxy", "no_proxy")
_CLUSTER_SUFFIXES = (".svc", ".cluster.local")
_EXAMPLE = "write it as host:port, or https://host:port"
_HTTP_PORT = 80


def normalize_address(text: str, *, name: str = "the address of a server") -> str:
    """Return `host:port`, with `https://` before it for TLS.

    Blanks around it, a slash behind it and `http://`, which clients of HTTP write, are left out.
    The port of `http://host` is 80, and `https://host` may go without one, as everywhere.

    Args:
        text: As a user wrote it.
        name: What it is called in an error.

    Raises:
        ConfigurationError: If it is no address.

    Example:
        >>> normalize_address(" http://gpu1:7377/ ")
        'gpu1:7377'
    """
    wrong = f"{name} is {text!r}"
    stripped = text.strip()
    scheme, separator, rest = stripped.rpartition("://")
    scheme = scheme.lower()
    if separator and scheme not in ("http", "https"):
        raise ConfigurationError(f"{wrong}, which is of no kind that is known", remedy=_EXAMPLE)
    rest = rest.rstrip("/")
    if "/" in rest or "?" in rest or "#" in rest:
        raise ConfigurationError(
            f"{wrong}, which has a path", remedy=f"leave out what follows the port; {_EXAMPLE}"
        )
    if "@" in rest:
        raise ConfigurationError(
            f"{name} holds a user or a password", remedy=f"keys are given by themselves; {_EXAMPLE}"
        )
    if not rest or any(sign.isspace() for sign in rest):
        raise ConfigurationError(f"{wrong}, which names no host", remedy=_EXAMPLE)
    if rest.count(":") > 1 and not rest.startswith("["):
        raise ConfigurationError(
            f"{wrong}, whose host is not told from its port", remedy="write IPv6 as [::1]:port"
        )
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        # Of a port that is none, and of brackets without their other half.
        raise ConfigurationError(f"{wrong}, which has no port", remedy=_EXAMPLE) from error
    if not host:
        raise ConfigurationError(f"{wrong}, which names no host", remedy=_EXAMPLE)
    if port is None:
        rest = rest.rstrip(":")
        if scheme == "http":
            return f"{rest}:{_HTTP_PORT}"
        if scheme == "https":
            return f"https://{rest}"
    if not port:
        raise ConfigurationError(f"{wrong}, which has no port", remedy=_EXAMPLE)
    return f"https://{rest}" if scheme == "https" else rest


def host_of(address: str) -> str:
    """Return the host of an address or URL, without brackets; empty if it has none."""
    try:
        return urlsplit(f"//{address.rpartition('://')[2]}").hostname or ""
    except ValueError:
        return ""


def is_loopback(address: str) -> bool:
    """Return whether an address or URL is one of this machine."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_near(address: str) -> bool:
    """Return whether an address is of this machine or of the cluster: never behind a proxy."""
    return is_loopback(address) or host_of(address).endswith(_CLUSTER_SUFFIXES)


def proxy_of(address: str, environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return the variable and the proxy, without its password, that calls to a server go through.

    Args:
        address: Of the server.
        environ: Variables of the process.

    Returns:
        None if they go there directly.
    """
    found = next((name for name in PROXY_VARIABLES if environ.get(name)), None)
    host = host_of(address)
    if found is None or not host or is_near(address):
        return None
    exempt = next((environ[name] for name in _EXEMPTING if environ.get(name)), "")
    suffixes = (part.strip() for part in exempt.split(","))
    if any(suffix and host.endswith(suffix.lstrip("*")) for suffix in suffixes):
        return None
    return found, environ[found].rpartition("@")[2]
