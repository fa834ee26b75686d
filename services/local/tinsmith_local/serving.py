"""`tinsmith up` once its words are checked: serves until it is stopped, and says how it is found.

Importing this loads torch and every pod, which takes seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rich.console import Console

from tinsmith.errors import ConfigurationError
from tinsmith.local_servers import (
    Announcement,
    LocalServer,
    chosen_address,
    list_servers,
)
from tinsmith.settings import state_dir
from tinsmith_local.embedded import EmbeddedConfig, EmbeddedServer, describe_server
from tinsmith_runtime.pod.main import freeze_started
from tinsmith_runtime.rpc.server import wait_for_signal

LOG_FILE = "server.log"
"""In the folder of the server: what it logs, beside standard error."""
_console = Console(stderr=False)


def describe(server: EmbeddedServer, config: EmbeddedConfig, others: Sequence[str] = ()) -> str:
    """Return what a user is told: where the server is, the key, and how clients are pointed at it.

    The key has two spellings, because clients of the Tinker wire insist on theirs.

    Args:
        server: The server, which runs.
        config: Its settings.
        others: A line for each other server of this machine.
    """
    url = server.address if "://" in server.address else f"http://{server.address}"
    tinker_key = server.api_key.replace("tsk_", "tml-", 1)
    warning = f"warning: {server.device_choice.warning}\n" if server.device_choice.warning else ""
    return (
        f"Tinsmith serves {', '.join(config.models)}\n"
        f"  address  {server.address}\n"
        f"  key      {server.api_key}\n"
        f"           {tinker_key}   the same, as tinker spells it\n"
        f"  data     {config.data_dir}\n"
        f"  log      {config.data_dir / LOG_FILE}, and here; a line of JSON for each event, "
        "--log-level INFO tells more\n"
        f"  device   {server.device_choice}\n"
        f"  bits     {_promise(server.exactness)}\n"
        "Clients on this machine:\n"
        f"  tinsmith  found by itself; else export TINSMITH_ADDRESS={server.address} "
        f"TINSMITH_API_KEY={server.api_key}\n"
        f"  tinker    export TINKER_BASE_URL={url} TINKER_API_KEY={tinker_key}\n"
        f"  openai    export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={server.api_key}\n"
        + "".join(f"{line}\n" for line in others)
        + warning
        + "Ctrl-C stops it; what was acknowledged survives."
    )


def _promise(exactness: Mapping[str, str]) -> str:
    """Return what base models promise, in words."""
    words = {
        "exact": "exact: what a tenant gets depends on nobody beside it",
        "fast": "fast: NOT exact, a tenant's last bits may depend on others",
        "fallback": "fallback: NOT exact, run by transformers",
    }
    if len(set(exactness.values())) == 1:
        return words[next(iter(exactness.values()))]
    return "; ".join(f"{name} {words[kind]}" for name, kind in exactness.items())


def describe_others(mine: str, servers: Sequence[LocalServer], chosen: str) -> list[str]:
    """Return what a user is told of the other servers of this machine.

    Args:
        mine: Address of the server that was just started.
        servers: All that are known.
        chosen: The address that `tinsmith use` named; empty if none.
    """
    others = [each for each in servers if each.is_running and each.address != mine]
    lines = [f"Also running: {each.address}, data {each.data_dir}" for each in others]
    if chosen and chosen != mine:
        lines.append(f"Commands go on using {chosen}; this one: tinsmith use {mine}")
    elif others:
        lines.append("Commands use this one now; another one: tinsmith use ADDRESS")
    return lines


async def serve(config: EmbeddedConfig) -> None:
    """Serve until a signal comes."""
    server = EmbeddedServer(config)
    stopped = asyncio.create_task(wait_for_signal())
    await server.start()
    freeze_started()
    folder = state_dir()
    with Announcement(folder, describe_server(server, config)):
        try:
            others = describe_others(server.address, list_servers(folder), chosen_address(folder))
        except ConfigurationError as error:
            # What another server left is no reason to end this one, which serves already.
            others = [str(error)]
        _console.print(describe(server, config, others), highlight=False, soft_wrap=True)
        await stopped
    # Found no longer: a command that comes now would meet a server that takes nothing new.
    _console.print("draining", highlight=False)
    await server.stop()
