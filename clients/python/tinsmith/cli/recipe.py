"""`tinsmith run`: a recipe with its configuration."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import shutil
import signal
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from tinsmith.cli.recipe_settings import settings_of
from tinsmith.client import Client
from tinsmith.config_values import load_config
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.dry_run import print_preview
from tinsmith.recipes.scenarios.table import SCENARIOS, configure
from tinsmith.recipes.sweep import Sweep, read_axes, run_sweep
from tinsmith.user_code import import_place

_MAX_WIDTH = 100

RECIPES = (
    "supervised",
    "rl",
    "dpo",
    "distillation",
    "rl_episodes",
    "self_play",
    "two_policies",
    "match",
    "evaluate",
)
SCENARIO = "scenario"


def run(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help=f"{', '.join(RECIPES)}, scenario, or FILE.py of your own.")
    ] = "",
    settings: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the experiment in the folder.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what supervised or dpo would train on; no run."),
    ] = False,
    shows_help: Annotated[
        bool, typer.Option("--help", "-h", help="Show this; with a recipe, also its settings.")
    ] = False,
) -> None:
    """Run a recipe; `key=value` words win over the file. The same command goes on after Ctrl-C.

    A number with commas, `learning_rate=1e-3,1e-2`, runs all values at once and compares them.
    `scenario name=...` is a recipe with its data, model and settings; alone it lists them.
    A file of your own has a dataclass `Config` and `main(config, client, observer=None)`.
    """
    if recipe == SCENARIO and (shows_help or not (settings or config)):
        print(describe_scenarios())
        return
    if shows_help or not recipe:
        print(describe_recipe(recipe) if recipe else context.get_help())
        raise typer.Exit(0 if shows_help else 2)
    words = [*(settings or []), *(["overwrite=true"] if overwrite else [])]
    module: Any
    parsed: Any
    if recipe == SCENARIO:
        module, parsed = configure(words, config)
    else:
        module = load_recipe(recipe)
        axes, rest = read_axes(module.Config, words)
        parsed = (
            Sweep(recipe, module, axes, rest, config)
            if axes
            else load_config(module.Config, config, words)
        )
    # What ends a process from outside (timeout, a shutdown) saves as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    with Client(display_name=f"tinsmith run {recipe}") as client:
        if dry_run:
            _show_data(module, parsed, client)
            return
        if isinstance(parsed, Sweep):
            run_sweep(
                parsed,
                client,
                lambda variant, client, observer: _finish(module.main(variant, client, observer)),
            )
        else:
            _finish(module.main(parsed, client))


def evaluate(
    context: typer.Context,
    settings: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results in the folder.")
    ] = False,
    shows_help: Annotated[
        bool, typer.Option("--help", "-h", help="Show this, with the settings.")
    ] = False,
) -> None:
    """Score models, checkpoints and runs side by side: `tinsmith run evaluate`, shorter."""
    run(context, "evaluate", settings, config, overwrite, shows_help=shows_help)


def _show_data(module: Any, parsed: Any, client: Client) -> None:
    """Print what a recipe would train on; the variants of a sweep differ in numbers alone."""
    if not hasattr(module, "preview"):
        raise ConfigurationError(
            "--dry-run shows rows of data, and this recipe trains on none",
            remedy="use it with supervised or dpo",
        )
    config = parsed.variants()[0].config if isinstance(parsed, Sweep) else parsed
    print_preview(module.preview(config, client))


def _finish(result: Any) -> None:
    """Wait for a recipe that is a coroutine."""
    if inspect.iscoroutine(result):
        asyncio.run(result)


def describe_scenarios() -> str:
    """Return what scenarios there are, and the recipe of each."""
    lines = ["Usage: tinsmith run scenario name=NAME [key=value]...", "", "Scenarios:"]
    for name, scenario in SCENARIOS.items():
        lines.append(f"  {name:14} {scenario.description}")
        settings = " ".join(f"{key}={value}" for key, value in scenario.settings.items())
        lines.append(f"  {'':14} tinsmith run {scenario.recipe} {settings}")
    lines.append("Further settings are those of the recipe: tinsmith run RECIPE --help")
    return "\n".join(lines)


def describe_recipe(recipe: str) -> str:
    """Return what a recipe does, and each of its settings with its default, for a terminal.

    Raises:
        ConfigurationError: If there is no such recipe.
    """
    module = load_recipe(recipe)
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    lines = [f"Usage: tinsmith run {recipe} [key=value]...", ""]
    for paragraph in inspect.cleandoc(module.__doc__ or "").split("\n\n"):
        lines += [*textwrap.wrap(" ".join(paragraph.split()), width), ""]
    lines.append("Settings:")
    indent = " " * 6
    for setting in settings_of(module.Config):
        lines.append(f"  {setting.name}={setting.default}  ({setting.kind})")
        lines += textwrap.wrap(
            setting.meaning, width, initial_indent=indent, subsequent_indent=indent
        )
    return "\n".join(lines)


def _interrupt(_number: int, _frame: Any) -> None:
    # A shell lets what it starts in the background ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def load_recipe(recipe: str) -> Any:
    """Return the module of a recipe: one that ships, or a file of the user.

    Raises:
        ConfigurationError: If there is none, or it is no recipe.
    """
    if recipe.endswith(".py"):
        return _load_file(recipe)
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


def _load_file(recipe: str) -> Any:
    module = import_place(recipe)
    for name in ("Config", "main"):
        if not hasattr(module, name):
            raise ConfigurationError(
                f"{recipe} has no {name}",
                remedy="a recipe has a dataclass Config and main(config, client, observer=None)",
            )
    return module
