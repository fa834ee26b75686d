"""The port of the embedded server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tinsmith_gateway.serving.port_multiplexer import bind
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.server import check_address

DEFAULT_PORT = 7077

_Bound = TypeVar("_Bound")


def check_port(port: int) -> None:
    """Refuse a port of loopback that is none, or that is taken; 0 picks a free one, later.

    Raises:
        ConfigError: If it is.
    """
    address = f"127.0.0.1:{port}"
    check_address("listen_address", address)
    if port:
        bound_or_told(lambda: bind(address)).close()


def bound_or_told(reserve: Callable[[], _Bound]) -> _Bound:
    """Reserve a port, and return what was reserved.

    Raises:
        ConfigError: If it is taken; says how to find another one.
    """
    try:
        return reserve()
    except ConfigError as error:
        raise ConfigError(
            f"{error} `tinsmith status` shows the servers that run; --port 0 takes a free port"
        ) from error
