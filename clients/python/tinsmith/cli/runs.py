"""`tinsmith runs`: what a project trains, one run in full, and what holds it up."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Annotated

import typer

from tinsmith.cli import time_travel
from tinsmith.cli.connection import connect
from tinsmith.cli.output import (
    AsJson,
    Watch,
    fields_of,
    repeated,
    show_json,
    show_list,
    show_record,
)
from tinsmith.client import Client
from tinsmith.errors import NotFoundError
from tinsmith.names import RunName
from tinsmith.types import LastMetric, TrainingRunInfo

app = typer.Typer(help="List, show, fork, replay and delete training runs.", no_args_is_help=True)
app.command("fork")(time_travel.fork_run)
app.command("replay")(time_travel.replay_step)
app.command("bisect")(time_travel.bisect_run)
app.command("keep")(time_travel.keep_run)

_Name = Annotated[str, typer.Argument(help="Resource name or id of a run.")]

_COLUMNS = {
    "name": "NAME",
    "state": "STATE",
    "step": "STEP",
    "last": "LAST",
    "updated": "UPDATED",
    "display_name": "DISPLAY NAME",
    "base_model": "BASE MODEL",
    "adapter": "ADAPTER",
    "create_time": "AGE",
    "num_pending_operations": "PENDING",
    "replay_diverged": "REPLAY DIVERGED",
    "worker": "TRAINER",
    "waiting_for": "WAITING FOR",
}
_STATE_HELP = (
    "Only those in this state: training, waiting, finished, idle, creating, moving or failed."
)
# The first one that a run has is shown.
_TOLD_METRICS = ("reward", "loss", "trainer/loss")
_CHECKPOINT_COLUMNS = {
    "name": "NAME",
    "kind": "KIND",
    "version": "VERSION",
    "size_bytes": "SIZE",
    "create_time": "AGE",
    "expire_time": "EXPIRES",
}


@dataclasses.dataclass(frozen=True, slots=True)
class _ListedRun(TrainingRunInfo):
    """A run with where its metrics stand."""

    step: int | None = None
    last: str = ""
    updated: datetime.datetime | None = None


@app.command("list")
def list_runs(
    state: Annotated[str, typer.Option(help=_STATE_HELP)] = "",
    base_model: Annotated[str, typer.Option(help="Only those of this base model.")] = "",
    name_part: Annotated[str, typer.Option("--name", help="Only those with this in a name.")] = "",
    watch: Watch = False,
    as_json: AsJson = False,
) -> None:
    """List the runs of the project, newest first: where they stand, what each waits for."""

    def is_wanted(run: TrainingRunInfo) -> bool:
        return (
            state in ("", run.state, run.activity)
            and base_model in ("", run.base_model)
            and (name_part in run.name or name_part in run.display_name)
        )

    with connect("tinsmith runs list") as client:
        for _ in repeated(watch):
            metrics = _metrics(client)
            runs = [run for run in _list(client) if is_wanted(run)]
            told = runs if as_json else [_in_one_word(run) for run in runs]
            show_list([_listed(run, metrics) for run in told], _COLUMNS, as_json=as_json)


@app.command("show")
def show_run(name: _Name, as_json: AsJson = False) -> None:
    """Show a run: where it stands, what it waits for, and its checkpoints."""
    with connect("tinsmith runs show") as client:
        whole = str(RunName.parse(name)) if "/" in name else str(RunName(client.project, name))
        found = [run for run in _list(client) if run.name == whole]
        if not found:
            raise NotFoundError(f"the run {name} does not exist", reason="RUN_NOT_FOUND")
        [run] = found
        checkpoints = client.checkpoints.list(run.name)
    if as_json:
        show_json({**dataclasses.asdict(run), "checkpoints": checkpoints})
        return
    show_record(_in_one_word(run), leave_out="activity")
    if checkpoints:
        print("\ncheckpoints:")
        show_list(checkpoints, _CHECKPOINT_COLUMNS, as_json=False)
    else:
        print("checkpoints: none; save one with run.save_state")


def _metrics(client: Client) -> dict[tuple[str, str], LastMetric]:
    found = client.runs.list_metrics(_TOLD_METRICS)
    return {(metric.run, metric.name): metric for metric in found}


def _listed(run: TrainingRunInfo, metrics: Mapping[tuple[str, str], LastMetric]) -> _ListedRun:
    values = fields_of(run)
    told = [metrics[run.name, name] for name in _TOLD_METRICS if (run.name, name) in metrics]
    if not told:
        return _ListedRun(**values)
    metric = told[0]
    name = metric.name.rpartition("/")[2]
    return _ListedRun(
        **values,
        step=metric.step,
        last=f"{name} {metric.value:.4g}",
        updated=metric.update_time,
    )


def _in_one_word(run: TrainingRunInfo) -> TrainingRunInfo:
    """Return a run for people: its state is what goes on in it, where it takes operations."""
    return dataclasses.replace(run, state=run.activity or run.state)


def _list(client: Client) -> list[TrainingRunInfo]:
    # What is served now: a run whose base model is not is told nothing of.
    served = {model.base_model: model.exactness for model in client.list_models()}
    return [
        dataclasses.replace(run, exactness=served.get(run.base_model, ""))
        for run in client.runs.list()
    ]


@app.command("delete")
def delete_runs(
    names: Annotated[list[str], typer.Argument(help="Resource names or ids.")],
) -> None:
    """Delete runs with their operations and checkpoints."""
    with connect("tinsmith runs delete") as client:
        for name in names:
            client.runs.delete(name)
            print(f"deleted {name}")
