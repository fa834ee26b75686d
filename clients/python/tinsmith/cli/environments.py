"""`tinsmith environments`: those that a server plays, and the beginning of one of your own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.output import AsJson, show_list
from tinsmith.errors import ConfigurationError

app = typer.Typer(help="List environments, and begin one of your own.", no_args_is_help=True)

_COLUMNS = {"name": "NAME", "description": "DESCRIPTION", "default_config": "SETTINGS"}
_CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9]*")
_TEMPLATE = '''"""{name}: answer a word with one of the same length."""

from tinsmith.environments.environment import Environment, Observation, StepResult

WORDS = ("tin", "iron", "copper", "zinc", "silver")


class {name}(Environment):
    """Which word is as long as this one?"""

    description = "Answer a word with one of the same length."
    default_config = {{"hint": False}}

    def reset(self, seed, config):
        """Begin an episode: the same seed and config give the same one."""
        self._word = WORDS[seed % len(WORDS)]
        hint = f" It has {{len(self._word)}} letters." if config["hint"] else ""
        return Observation.of_user(f"A word as long as {{self._word}}?{{hint}}")

    def step(self, action):
        """Take an answer; `done` ends the episode, else the observation goes on with it."""
        text = (action.text or "").strip()
        distance = abs(sum(letter.isalpha() for letter in text) - len(self._word))
        # A model that is never right learns from what is nearly so.
        reward = 1 / (1 + distance)
        return StepResult(Observation(), reward, done=True, info={{"is_success": distance == 0}})
'''
"""Answers of random weights earn different rewards in it, so that a group of them teaches."""


@app.command("list")
def list_environments(as_json: AsJson = False) -> None:
    """List the environments that the server plays, with their settings."""
    with connect("tinsmith environments list") as client:
        show_list(client.environments.list(), _COLUMNS, as_json=as_json)


@app.command("new")
def new_environment(
    target: Annotated[str, typer.Argument(help="FILE.py:CLASS, both of your own.")],
) -> None:
    """Write an environment that works, to be changed, and say how it is played."""
    file, _, name = target.partition(":")
    path = Path(file)
    if path.suffix != ".py" or _CLASS_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"{target!r} is not FILE.py:CLASS", remedy="write letters.py:LettersEnvironment"
        )
    try:
        with path.open("x", encoding="utf-8") as opened:
            opened.write(_TEMPLATE.format(name=name))
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be written: {error.strerror}", remedy="name another file"
        ) from error
    print(f"written to {file}; train on it, or have a server play it:")
    print(f"  tinsmith run rl environment={target}")
    print(f"  tinsmith up --environment {path.stem}:{name}")
