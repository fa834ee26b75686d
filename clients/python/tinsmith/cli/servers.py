"""`tinsmith status` and `tinsmith use`: which servers run here, and which one is used."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import typer

from tinsmith.cli.output import AsJson, show_json
from tinsmith.errors import ConfigurationError
from tinsmith.local_servers import LocalServer, choose, list_servers, server_in_use
from tinsmith.settings import state_dir

NEWEST = "newest"


def status(as_json: AsJson = False) -> None:
    """Show the servers that run on this machine, and which one commands use."""
    folder = state_dir()
    running = [server for server in list_servers(folder) if server.is_running]
    named = os.environ.get("TINSMITH_ADDRESS", "")
    used, problem = named, ""
    if not named:
        try:
            used = _address(server_in_use(folder))
        except ConfigurationError as error:
            problem = str(error)
    if as_json:
        show_json([_record(server, used) for server in running])
        return
    for server in running:
        mark = "*" if server.address == used else " "
        print(f"{mark} {server.address}  serves {', '.join(server.models)}  on {server.device}")
        print(f"    data {server.data_dir}  process {server.pid}  since {_local_time(server)}")
    if named and named not in {server.address for server in running}:
        print(f"* {named}  TINSMITH_ADDRESS")
    if problem:
        print(problem)
    elif not running and not named:
        print("no server runs on this machine; start one: tinsmith up")
    elif len(running) > 1 and not named:
        print("* is used by commands and clients; another one: tinsmith use ADDRESS")


def use(
    address: Annotated[str, typer.Argument(help="An address, its port, or `newest`.")],
) -> None:
    """Choose which server of this machine commands and clients use."""
    folder = state_dir()
    if address == NEWEST:
        choose(folder, "")
        used = server_in_use(folder)
        print(f"the newest server is used: {used.address}" if used else "no server runs")
        return
    running = [server for server in list_servers(folder) if server.is_running]
    for server in running:
        if address in (server.address, server.address.rpartition(":")[2]):
            choose(folder, server.address)
            print(f"{server.address} is used")
            return
    known = ", ".join(server.address for server in running)
    raise ConfigurationError(
        f"no server of this machine has the address {address}",
        remedy=f"those that run: {known}"
        if known
        else "start one with `tinsmith up`; servers elsewhere: TINSMITH_ADDRESS, TINSMITH_API_KEY",
    )


def _address(server: LocalServer | None) -> str:
    return "" if server is None else server.address


def _local_time(server: LocalServer) -> str:
    return server.start_time.astimezone().strftime("%Y-%m-%d %H:%M")


def _record(server: LocalServer, used: str) -> dict[str, object]:
    values = dataclasses.asdict(server)
    del values["api_key"], values["is_running"]
    return values | {"is_used": server.address == used}
