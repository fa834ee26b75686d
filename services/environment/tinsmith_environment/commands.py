"""`tinsmith env`: environments of one's own as a server, which is an environment pod."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tinsmith_environment.class_names import named_classes
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.pod import EnvironmentPod
from tinsmith_runtime.config import load_config
from tinsmith_runtime.errors import ConfigError, TinsmithError, sentence_of
from tinsmith_runtime.observability.logs import configure_logging
from tinsmith_runtime.pod.main import serve as serve_pod

env = typer.Typer(help="Environments of your own.", no_args_is_help=True)


@env.callback()
def _group() -> None:
    """Keep the group, though it has one command."""


@env.command("serve")
def serve(
    environments: Annotated[
        list[str],
        typer.Argument(help="module:Class, NAME=module:Class, gymnasium:ID, verifiers:ID."),
    ],
    scheduler_address: Annotated[
        str, typer.Option("--scheduler", help="host:port. Default: TINSMITH_SCHEDULER_ADDRESS.")
    ] = "",
    listen_address: Annotated[
        str, typer.Option("--listen", help="host:port; port 0, the default, picks a free one.")
    ] = "",
    worker_name: Annotated[
        str, typer.Option("--name", help="Identity at the scheduler, the same after a restart.")
    ] = "",
    pool: Annotated[str, typer.Option(help="Serve callers of this pool alone.")] = "",
    num_workers: Annotated[str, typer.Option(help="Processes that are kept ready.")] = "",
    python_path: Annotated[
        str, typer.Option(help="Folders of the modules, separated by ':'. Default: this one.")
    ] = "",
    metrics_address: Annotated[
        str, typer.Option(help="host:port of the Prometheus endpoint.")
    ] = "",
    pod_certificate: Annotated[
        str, typer.Option("--certificate", help="PEM file that other pods are shown.")
    ] = "",
    pod_certificate_key: Annotated[
        str, typer.Option("--certificate-key", help="PEM file of its private key.")
    ] = "",
    pod_authority: Annotated[
        str, typer.Option("--authority", help="PEM file of the pods' authority.")
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="TOML file with further settings of the pod.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="Of the JSON logs on stderr.")] = "WARNING",
) -> None:
    """Serve environments as a process of its own, for the clients and coordinators of a deployment.

    It is the environment pod with your classes. The key of the pods is read from TINSMITH_POD_KEY
    alone, since command lines are seen by others.
    """
    configure_logging("environment", level=log_level.upper())
    try:
        settings = read_settings(
            environments,
            {
                "scheduler_address": scheduler_address,
                "listen_address": listen_address,
                "worker_name": worker_name,
                "pool": pool,
                "num_workers": num_workers,
                "python_path": python_path,
                "metrics_address": metrics_address,
                "pod_certificate": pod_certificate,
                "pod_certificate_key": pod_certificate_key,
                "pod_authority": pod_authority,
            },
            config,
        )
        _run(settings)
    except (ConfigError, TinsmithError, OSError) as error:
        print(f"error: {' '.join(sentence_of(error).split())}", file=sys.stderr)
        raise typer.Exit(1) from error


def read_settings(
    environments: list[str], flags: Mapping[str, str], path: Path | None = None
) -> EnvironmentConfig:
    """Return the settings of the pod: flags win over variables, and those over the file.

    Args:
        environments: Words of the command line; see `named_classes`.
        flags: Settings by name; empty ones are not given.
        path: A TOML file.

    Raises:
        ConfigError: If a word or a setting is wrong, or the scheduler or the key is missing.
    """
    named = named_classes(environments)
    given = {
        "python_path": os.getcwd(),
        # Two processes of one machine that serve other things are other workers.
        "worker_name": f"environment-{socket.gethostname()}-{'-'.join(sorted(named))}"[:63],
    }
    variables = {f"TINSMITH_{name.upper()}": value for name, value in given.items()} | dict(
        os.environ
    )
    chosen = {
        **{name: value for name, value in flags.items() if value},
        "environments": ",".join(f"{name}={path}" for name, path in named.items()),
    }
    variables |= {f"TINSMITH_{name.upper()}": value for name, value in chosen.items()}
    return load_config(EnvironmentConfig, path=path, environment=variables)


def _run(settings: EnvironmentConfig) -> None:
    async def serve() -> None:
        pod = EnvironmentPod(settings)
        names = ", ".join(settings.class_paths())
        await serve_pod(
            pod, on_started=lambda: print(f"serving {names} at {pod.address}", flush=True)
        )

    asyncio.run(serve())
