"""Checks of this machine: what a client or `tinsmith up` finds here before it calls anything."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tinsmith.addresses import host_of, normalize_address, proxy_of
from tinsmith.doctor.findings import Finding, good, note, problem
from tinsmith.errors import ConfigurationError
from tinsmith.local_servers import list_servers, server_in_use
from tinsmith.settings import cache_dir, state_dir

CLIENT_VARIABLES = (
    "TINSMITH_ADDRESS",
    "TINSMITH_API_KEY",
    "TINSMITH_PROJECT",
    "TINSMITH_CA_FILE",
    "TINSMITH_STATE_DIR",
    "TINSMITH_CACHE_DIR",
    "TINSMITH_DEBUG",
)
"""What clients and the command line read."""

_LEAST_FREE_BYTES = 2 * 1000**3
_LOCAL_PACKAGES = ("torch", "transformers", "sqlalchemy", "uvicorn")
_KEY_PREFIXES = ("tsk_", "tml-tsk_", "tml-")


def check_machine(
    environ: Mapping[str, str] = os.environ,
    *,
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> Iterator[Finding]:
    """Look at this machine.

    Args:
        environ: Variables of the process.
        free_bytes: Room on the disk of a folder.

    Yields:
        What was found, good findings included.
    """
    yield _python()
    yield from _variables(environ)
    yield from _address(environ)
    yield from _proxy(environ)
    yield from _authorities(environ)
    yield from _folders(environ)
    yield from _servers(environ, free_bytes)
    yield from _packages(environ)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return good("python", f"Python {version} at {sys.executable}")


def _variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables that nothing reads, and that look like one that is read."""
    for name in sorted(environ):
        if not name.upper().startswith("TINSMITH") or name in CLIENT_VARIABLES:
            continue
        close = difflib.get_close_matches(name.upper(), CLIENT_VARIABLES, n=1, cutoff=0.85)
        if close:
            yield problem(
                "variables", f"{name} is set, which nothing reads", f"did you mean {close[0]}?"
            )
    key = environ.get("TINSMITH_API_KEY", "")
    if key and (key != key.strip() or not key.startswith(_KEY_PREFIXES)):
        yield problem(
            "variables",
            "TINSMITH_API_KEY is no key: it does not begin with tsk_, or has blanks around it",
            "copy the key anew, as `tinsmith up` or `tinsmith keys create` print it",
        )


def _address(environ: Mapping[str, str]) -> Iterator[Finding]:
    address = environ.get("TINSMITH_ADDRESS", "")
    if not address:
        return
    try:
        address = normalize_address(address, name="TINSMITH_ADDRESS")
    except ConfigurationError as error:
        yield problem("address", error.message, error.remedy)
    if environ.get("TINSMITH_API_KEY", "") == "" and not _is_local(environ, address):
        yield problem(
            "address",
            f"TINSMITH_ADDRESS is {address} and no key is set",
            "set TINSMITH_API_KEY; its owner makes one with `tinsmith keys create`",
        )


def _is_local(environ: Mapping[str, str], address: str) -> bool:
    try:
        return any(each.address == address for each in list_servers(state_dir(environ)))
    except ConfigurationError:
        return False


def _proxy(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find a proxy that gRPC would send the calls through."""
    address = environ.get("TINSMITH_ADDRESS", "")
    proxy = proxy_of(address, environ)
    if proxy is not None:
        host = host_of(address)
        yield problem(
            "proxy",
            f"{proxy[0]} is set, so that calls to {host} go through the proxy {proxy[1]}",
            f"export no_proxy={host}",
        )


def _authorities(environ: Mapping[str, str]) -> Iterator[Finding]:
    file = environ.get("TINSMITH_CA_FILE", "")
    if not file:
        return
    try:
        is_pem = "-----BEGIN CERTIFICATE-----" in Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        is_pem = False
    if not is_pem:
        yield problem(
            "certificates",
            f"TINSMITH_CA_FILE is {file}, which holds no certificate in PEM",
            "name the file of the authority that signed the server's certificate",
        )


def _folders(environ: Mapping[str, str]) -> Iterator[Finding]:
    for folder in (state_dir(environ), cache_dir(environ)):
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            yield problem(
                "folders",
                f"{folder} cannot be written",
                "give it to this user, or set TINSMITH_STATE_DIR and TINSMITH_CACHE_DIR",
            )
    for file in (state_dir(environ) / "servers").glob("*.json"):
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            yield problem(
                "folders",
                f"{file}, which holds a key, can be read by other users",
                f"chmod 600 {file}",
            )


def _servers(environ: Mapping[str, str], free_bytes: Callable[[Path], int]) -> Iterator[Finding]:
    folder = state_dir(environ)
    if not environ.get("TINSMITH_ADDRESS"):
        try:
            used = server_in_use(folder)
        except ConfigurationError as error:
            yield problem("server", error.message, error.remedy)
            return
        if used is None:
            yield problem(
                "server", "no server runs here, and TINSMITH_ADDRESS names none", "tinsmith up"
            )
    running = [each for each in list_servers(folder) if each.is_running]
    for server in running:
        yield good("server", f"{server.address} runs, process {server.pid}")
        data = Path(server.data_dir)
        if server.data_dir and data.is_dir() and free_bytes(data) < _LEAST_FREE_BYTES:
            yield problem(
                "disk",
                f"{free_bytes(data) / 1000**3:.1f} GB are free where {server.address} keeps its "
                f"data, {data}",
                "delete runs and checkpoints that are not needed: tinsmith runs delete NAME",
            )
    if len(running) > 1 and not environ.get("TINSMITH_ADDRESS"):
        yield note(
            "server",
            f"{len(running)} servers run here; the newest is used unless one was chosen",
            "tinsmith status shows which; tinsmith use ADDRESS chooses",
        )


def _packages(environ: Mapping[str, str]) -> Iterator[Finding]:
    missing = [name for name in _LOCAL_PACKAGES if importlib.util.find_spec(name) is None]
    if missing and not environ.get("TINSMITH_ADDRESS"):
        yield note(
            "packages",
            f"{', '.join(missing)} are not installed, which `tinsmith up` needs",
            "pip install 'tinsmith[local]', or set TINSMITH_ADDRESS to a server elsewhere",
        )
