"""The CLI commands that need more than the client: `up`, `models`, `certificates`, `database`.

What loads torch is imported in the functions that need it, so that a wrong word is told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tinsmith.local_servers import announcements
from tinsmith.settings import state_dir
from tinsmith_environment.class_names import named_classes
from tinsmith_local.certificates import make_certificates
from tinsmith_local.database_users import make_database_users
from tinsmith_local.made_models import MADE_MODELS, TINY, make_model
from tinsmith_local.overrides import read_overrides
from tinsmith_local.ports import DEFAULT_PORT, check_port
from tinsmith_local.random_shapes import SHAPES
from tinsmith_runtime.devices import AUTO
from tinsmith_runtime.errors import ConfigError, TinsmithError, sentence_of
from tinsmith_runtime.model_directories import model_directory
from tinsmith_runtime.observability.logs import configure_logging, log_to_file

_EXACT = {AUTO: None, "true": True, "false": False}

models = typer.Typer(help="Make models.", no_args_is_help=True)
certificates = typer.Typer(help="Certificates of pods.", no_args_is_help=True)
database = typer.Typer(help="The PostgreSQL database of pods.", no_args_is_help=True)
_console = Console(stderr=False)


def up(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Base model: a directory, a hub id, or NAME=either. Made on the spot: "
            f"{', '.join(MADE_MODELS)}. Default: tiny."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where everything is kept.")] = None,
    port: Annotated[int, typer.Option(help="Port on loopback; 0 picks a free one.")] = DEFAULT_PORT,
    num_threads: Annotated[int, typer.Option(help="Threads of one operation; 0: all cores.")] = 0,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:N, or auto: the GPU if there is one.")
    ] = AUTO,
    dtype: Annotated[
        str,
        typer.Option(help="Of the base model: float32, bfloat16, or auto: bfloat16 on a GPU."),
    ] = AUTO,
    exact: Annotated[
        str,
        typer.Option(
            help="Whether tenants do not touch each other's bits. true: refuse to start where this "
            "machine cannot promise it; auto: start, and say so; false: do not try."
        ),
    ] = AUTO,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compile kernels at start: faster, takes a minute.")
    ] = False,
    metrics_address: Annotated[
        str | None, typer.Option(help="host:port of the Prometheus endpoint.")
    ] = None,
    math_problems_path: Annotated[
        Path | None, typer.Option(help="GSM8K-layout JSONL file of the math environment.")
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            help="Environment of your own: module:Class, NAME=module:Class, gymnasium:ID or "
            "verifiers:ID; "
            "modules are found from this folder."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with settings of pods: tables scheduler, trainer, ..."),
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="Of the JSON logs, on stderr and in the file.")
    ] = "WARNING",
    until_input_ends: Annotated[
        bool, typer.Option("--until-input-ends", hidden=True, help="Stop once stdin is closed.")
    ] = False,
) -> None:
    """Run all services in this process, on loopback; print the address and the key."""
    if until_input_ends:
        threading.Thread(target=_stop_after_input, name="input", daemon=True).start()
    folder = data_dir or state_dir() / "data"
    try:
        configure_logging("local", level=log_level.upper())
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        sources = model_sources(model or [TINY])
        check_port(port)
        settings = with_environments(
            read_overrides(config) if config is not None else {}, environment or []
        )
        if _console.is_terminal:
            # What comes now takes half a minute on a busy machine.
            _console.print(f"starting: loads torch, then {', '.join(sources)}", highlight=False)
        from tinsmith_local.embedded import EmbeddedConfig, make_data_dir
        from tinsmith_local.serving import LOG_FILE, serve

        make_data_dir(folder)
        log_to_file("local", folder / LOG_FILE)
        embedded = EmbeddedConfig(
            data_dir=folder,
            models=make_models(sources, folder),
            port=port,
            num_threads=num_threads,
            device=device,
            dtype=dtype,
            exact=parse_exact(exact),
            compiled=compiled or None,
            metrics_address=metrics_address,
            math_problems_path=math_problems_path,
            # Servers tell the clients of this user their keys there.
            hidden_folders=(announcements(state_dir()),),
            overrides=settings,
        )
        asyncio.run(serve(embedded))
    except (ConfigError, TinsmithError, OSError) as error:
        # One line, whatever libraries put into theirs: logs and scripts search for it.
        print(f"error: {' '.join(sentence_of(error).split())}", file=sys.stderr)
        raise typer.Exit(1) from error


def _stop_after_input() -> None:
    """Stop as a signal would, once the process that started this one is gone."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def with_environments(
    overrides: Mapping[str, dict[str, object]], words: Sequence[str]
) -> dict[str, dict[str, object]]:
    """Return the settings of pods with environments that a command line names.

    Args:
        overrides: Settings of a file.
        words: See `named_classes`.

    Raises:
        ConfigError: If a word is none, or the file names another one so.
    """
    if not words:
        return dict(overrides)
    table = dict(overrides.get("environment", {}))
    earlier = [each.strip() for each in str(table.get("environments", "")).split(",")]
    named = named_classes([*filter(None, earlier), *words])
    table["environments"] = ",".join(f"{name}={path}" for name, path in named.items())
    table["python_path"] = ":".join(filter(None, [str(table.get("python_path", "")), os.getcwd()]))
    return {**overrides, "environment": table}


@models.command("build-tiny")
def build_tiny(
    directory: Annotated[Path, typer.Argument(help="Where to put it.")],
    name: Annotated[
        str, typer.Option(help=f"As `tinsmith up --model` knows it: {', '.join(MADE_MODELS)}.")
    ] = TINY,
) -> None:
    """Make a tiny model with random weights and its tokenizer; no download."""
    if name not in MADE_MODELS:
        raise typer.BadParameter(f"{name} is none of {', '.join(MADE_MODELS)}", param_hint="--name")
    _console.print(f"{name} model in {MADE_MODELS[name](directory)}", highlight=False)


@models.command("build-random")
def build_random(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    directory: Annotated[Path, typer.Argument(help="Where to put it.")],
    layers: Annotated[int, typer.Option(help="How many of its layers; 0: all.")] = 0,
) -> None:
    """Make a model of a real shape with random weights, to size a machine; no download."""
    from tinsmith_local.random_model import build_random_model

    try:
        path = build_random_model(directory, shape, num_layers=layers or None)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    _console.print(f"{shape} with random weights in {path}", highlight=False)


@certificates.command("make")
def make_pod_certificates(
    directory: Annotated[Path, typer.Argument(help="Keeps the authority; a folder for each role.")],
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace; empty outside.")] = "",
    days: Annotated[float, typer.Option(help="How long they are valid.", min=0.01)] = 90.0,
) -> None:
    """Make certificates of all pods, or renew them; pods read changed files while they run."""
    try:
        issued = make_certificates(directory, namespace=namespace, days=days)
    except ConfigError as error:
        _console.print(f"error: {sentence_of(error)}", style="red", highlight=False)
        raise typer.Exit(1) from error
    for each in issued:
        _console.print(
            f"{each.role:12} {each.folder}  until {each.expire_time:%Y-%m-%d %H:%M} UTC",
            highlight=False,
            soft_wrap=True,
        )


@database.callback()
def _database() -> None:
    """Keep `users` a command of its own."""


@database.command("users")
def make_users(
    url: Annotated[str, typer.Argument(help="postgresql://..., with a user that makes others.")],
    prefix: Annotated[str, typer.Option(help="Begins their names.")] = "tinsmith",
) -> None:
    """Make a user for each kind of pod, or renew passwords; print `<pod>-database-url=...`."""
    try:
        users = asyncio.run(make_database_users(url, prefix=prefix))
    except ConfigError as error:
        print(f"error: {sentence_of(error)}", file=sys.stderr)
        raise typer.Exit(1) from error
    for user in users:
        print(f"{user.role}-database-url={user.url}")


def model_sources(entries: Sequence[str]) -> dict[str, str]:
    """Return where base models come from, by name: `NAME=SOURCE`, or a source by its last part.

    Raises:
        ConfigError: If two have one name.
        ModelNotFoundError: If a source can be neither a directory of a model nor a hub id.
    """
    named: dict[str, str] = {}
    for entry in entries:
        name, source = _pair(entry) if "=" in entry else (_name_of(entry), entry)
        if name in named:
            raise ConfigError(f"two base models are named {name!r}; use NAME=SOURCE")
        if source not in MADE_MODELS:
            model_directory(source)
        named[name] = source
    return named


def make_models(sources: Mapping[str, str], data_dir: Path) -> dict[str, str]:
    """Return the sources with a directory for each that is made on the spot."""
    return {
        name: str(make_model(source, data_dir)) if source in MADE_MODELS else source
        for name, source in sources.items()
    }


def parse_exact(text: str) -> bool | None:
    """Return what `--exact` asks for; None for auto.

    Raises:
        ConfigError: If it is neither auto, true nor false.
    """
    if text not in _EXACT:
        raise ConfigError(f"--exact is {text!r}; use auto, true or false")
    return _EXACT[text]


def _name_of(source: str) -> str:
    """A directory is named by its last part; a hub id is its own name."""
    return Path(source).resolve().name if Path(source).is_dir() else source


def _pair(entry: str) -> tuple[str, str]:
    name, separator, value = entry.partition("=")
    if not (name and separator and value):
        raise ConfigError(f"{entry!r} is not NAME=VALUE")
    return name, value
