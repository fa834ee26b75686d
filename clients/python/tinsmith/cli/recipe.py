"""`tinsmith run`: a recipe with its configuration."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from tinsmith.client import Client
from tinsmith.config_values import load_config
from tinsmith.errors import ConfigurationError

RECIPES = ("supervised", "rl", "rl_episodes")


def run(
    recipe: Annotated[str, typer.Argument(help="supervised, rl or rl_episodes.")],
    settings: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the experiment in the folder.")
    ] = False,
) -> None:
    """Run a recipe; `key=value` words win over the file. The same command goes on after Ctrl-C."""
    module = _load(recipe)
    words = [*(settings or []), *(["overwrite=true"] if overwrite else [])]
    parsed: Any = load_config(module.Config, config, words)
    # What ends a process from outside (timeout, a shutdown) saves as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    with Client(display_name=f"tinsmith run {recipe}") as client:
        result = module.main(parsed, client)
        if inspect.iscoroutine(result):
            asyncio.run(result)


def _interrupt(_number: int, _frame: Any) -> None:
    # A shell lets what it starts in the background ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _load(recipe: str) -> Any:
    name = f"tinsmith.recipes.{recipe}"
    try:
        if not re.fullmatch(r"[a-z][a-z_]*", recipe):
            raise ModuleNotFoundError(name=name)
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ConfigurationError(
                f"the recipe {recipe} needs {error.name}, which is not installed",
                remedy=f"pip install {error.name}",
            ) from error
        module = None
    if not hasattr(module, "Config") or not hasattr(module, "main"):
        raise ConfigurationError(
            f"there is no recipe {recipe!r}", remedy=f"use one of {', '.join(RECIPES)}"
        )
    return module
