"""Where the server is and how patient the client is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith.addresses import normalize_address
from tinsmith.errors import ConfigurationError
from tinsmith.local_servers import LocalServer, list_servers, server_in_use
from tinsmith.names import is_valid_id


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How calls that failed for a passing reason are sent again, with the same request id."""

    budget_s: float = 120.0
    """Time from the first failure after which a call gives up; covers the restart of a pod."""
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 3.0

    def __post_init__(self) -> None:
        if self.budget_s < 0:
            raise ConfigurationError(f"retry budget_s must be 0 or more, got {self.budget_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientSettings:
    """Everything that a client needs to know."""

    address: str
    """`host:port`; `https://host:port` for TLS."""
    api_key: str = field(repr=False)
    project: str = ""
    """Id of the project; that of the key if empty, which the server is asked for at connect."""
    ca_file: Path | None = None
    """PEM file of the authorities that an `https://` server is trusted by; else gRPC's own list."""
    call_timeout_s: float = 60.0
    """Deadline of each call, sampling apart."""
    operation_timeout_s: float = 3600.0
    """How long `result()` waits unless it is told otherwise; deadline of sampling."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)


@dataclass(frozen=True, slots=True)
class Origin:
    """The server and the project that a handle is of: what another process needs to reopen it.

    There is no key in it: each process takes its own, as a new client does.
    """

    address: str
    project: str
    ca_file: Path | None = None


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory where each `tinsmith up` says where it is."""
    return Path(environ.get("TINSMITH_STATE_DIR") or Path.home() / ".tinsmith")


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of downloads that can be made again."""
    if environ.get("TINSMITH_CACHE_DIR"):
        return Path(environ["TINSMITH_CACHE_DIR"])
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinsmith"


def resolve_settings(
    *,
    address: str | None = None,
    api_key: str | None = None,
    project: str | None = None,
    ca_file: Path | str | None = None,
    operation_timeout_s: float = 3600.0,
    retry: RetryPolicy | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ClientSettings:
    """Return settings from arguments, else `TINSMITH_*` variables, else a server of this machine.

    The key of a local server is used only with its own address, so that it goes to no other one.

    Raises:
        ConfigurationError: If address or key is missing; it names both ways to give them. If the
            address is none. If the local server that is to be used does not run.
    """
    name = "the address" if address else "TINSMITH_ADDRESS"
    address = address or environ.get("TINSMITH_ADDRESS") or ""
    if address:
        address = normalize_address(address, name=name)
    api_key = api_key or environ.get("TINSMITH_API_KEY")
    project = project or environ.get("TINSMITH_PROJECT")
    ca_file = ca_file or environ.get("TINSMITH_CA_FILE")
    if not address or not api_key:
        local = _local_server(state_dir(environ), address)
        if local is not None:
            address = local.address
            # Another key may be of another project.
            if api_key in (None, "", local.api_key):
                api_key, project = local.api_key, project or local.project
    if not address or not api_key:
        missing = " and ".join(
            name for name, value in (("address", address), ("API key", api_key)) if not value
        )
        raise ConfigurationError(
            f"no {missing} of a Tinsmith server",
            remedy="run `tinsmith up`, set TINSMITH_ADDRESS and TINSMITH_API_KEY, or pass"
            " address= and api_key=",
        )
    if project and not is_valid_id(project):
        raise ConfigurationError(
            f"{project!r} is not the id of a project", remedy="use letters, digits, '-', '_', '.'"
        )
    return ClientSettings(
        address=address,
        api_key=api_key,
        project=project or "",
        ca_file=Path(ca_file) if ca_file else None,
        operation_timeout_s=operation_timeout_s,
        retry=retry or RetryPolicy(),
    )


def local_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address of the server of `tinsmith up` that is in use here; empty if none is."""
    local = server_in_use(state_dir(environ))
    return "" if local is None else local.address


def _local_server(directory: Path, address: str | None) -> LocalServer | None:
    """Return the server of this machine that has an address, else the one that is in use."""
    if not address:
        return server_in_use(directory)
    return next((each for each in list_servers(directory) if each.address == address), None)
