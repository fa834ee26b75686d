"""The reference of the command line: what each command says of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

# Read when typer is imported: help without boxes, of one width wherever it is made.
os.environ["TYPER_USE_RICH"] = "0"
os.environ["COLUMNS"] = "96"

import typer

from tinsmith.cli.app import build_app


def pages() -> Mapping[str, str]:
    """Return the pages by their names below the folder of references."""
    return {"cli/index.md": _commands()}


def _commands() -> str:
    names = sorted(_root("").commands)
    parts = [
        "# Commands\n\nGenerated from the code: what `--help` says of each command. "
        "Settings of `tinsmith run` are on [a page of their own](../../recipes.md).\n"
    ]
    return "\n".join([*parts, *(command_help(name) for name in names)])


def command_help(name: str) -> str:
    """Return the sections of a command and of what is below it; it alone is imported."""
    root = _root(name)
    with root.make_context("tinsmith", [name], resilient_parsing=True) as context:
        return "\n".join(_described(root.commands[name], context))


def _root(name: str) -> Any:
    return typer.main.get_command(build_app([name]))


def _described(command: Any, parent: Any) -> Iterator[str]:
    context = command.make_context(command.name, [], parent=parent, resilient_parsing=True)
    marks = "#" * (context.command_path.count(" ") + 1)
    yield f"{marks} {context.command_path}\n\n```text\n{command.get_help(context).strip()}\n```\n"
    for sub in getattr(command, "commands", {}).values():
        yield from _described(sub, context)
