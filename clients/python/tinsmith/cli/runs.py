"""`tinsmith runs`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.output import AsJson, show_list

app = typer.Typer(help="List and delete training runs.", no_args_is_help=True)

_COLUMNS = {
    "name": "NAME",
    "state": "STATE",
    "create_time": "AGE",
    "base_model": "BASE MODEL",
    "adapter": "ADAPTER",
    "rank": "RANK",
    "activity": "ACTIVITY",
    "num_pending_operations": "PENDING",
    "display_name": "DISPLAY NAME",
    "exactness": "EXACTNESS",
    "replay_diverged": "REPLAY DIVERGED",
    "worker": "TRAINER",
    "waiting_for": "WAITING FOR",
}


@app.command("list")
def list_runs(as_json: AsJson = False) -> None:
    """List the runs of the project, newest first."""
    with connect("tinsmith runs list") as client:
        # What is served now: a run whose base model is not is told nothing of.
        served = {model.base_model: model.exactness for model in client.list_models()}
        rows = [
            dataclasses.replace(run, exactness=served.get(run.base_model, ""))
            for run in client.runs.list()
        ]
        show_list(rows, _COLUMNS, as_json=as_json)


@app.command("delete")
def delete_runs(
    names: Annotated[list[str], typer.Argument(help="Resource names or ids.")],
) -> None:
    """Delete runs with their operations and checkpoints."""
    with connect("tinsmith runs delete") as client:
        for name in names:
            client.runs.delete(name)
            print(f"deleted {name}")
