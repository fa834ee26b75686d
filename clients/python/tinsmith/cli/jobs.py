"""`tinsmith jobs`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from tinsmith.cli.connection import connect
from tinsmith.cli.durations import parse_duration
from tinsmith.cli.output import AsJson, describe_age, show_json, show_list
from tinsmith.errors import ConfigurationError
from tinsmith.jobs.job_calls import JobInfo
from tinsmith.jobs.methods import METHODS, SAMPLING_METHODS, UNTRAINED_METHODS
from tinsmith.kubectl_yaml import parse_value

app = typer.Typer(help="Hand trainings in and look after them.", no_args_is_help=True)

_AGENTS = "black,white"
"""Of a match that names none."""
_COLUMNS = {
    "name": "NAME",
    "phase": "PHASE",
    "progress": "PROGRESS",
    "eta": "ETA",
    "reward": "REWARD",
    "age": "AGE",
    "waiting_for": "WAITING FOR",
}

_Name = Annotated[str, typer.Argument(help="Name or id of the job.")]
_Names = Annotated[list[str], typer.Argument(help="Names or ids of jobs.")]


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    name: str
    phase: str
    progress: str
    eta: str
    reward: str
    age: str
    waiting_for: str


@app.command("submit")
def submit(
    file: Annotated[
        Path | None, typer.Argument(help="YAML manifest, as `kubectl apply` takes it.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the recipe; with --recipe.")
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(help=f"A spec.method.type: {', '.join(METHODS)}."),
    ] = "",
    model: Annotated[str, typer.Option(help="Base model; with --recipe.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Optimizer steps; with --recipe.")] = 0,
    adapter: Annotated[str, typer.Option(help="lora or full; with --recipe.")] = "lora",
    name: Annotated[str, typer.Option(help="Id of the job; wins over the file's.")] = "",
    as_json: AsJson = False,
) -> None:
    """Hand a job in: a manifest, or a recipe with its settings."""
    if (file is None) == (not recipe):
        raise ConfigurationError("there is no job to submit", remedy="give FILE or --recipe")
    if file is None and not name:
        raise ConfigurationError("the job has no name", remedy="add --name")
    with connect("tinsmith jobs submit") as client:
        if file is not None:
            job = client.jobs.create(name, manifest=file)
        else:
            spec = spec_of_recipe(recipe, model, steps, adapter, settings or [])
            job = client.jobs.create(name, spec)
    if as_json:
        show_json(dataclasses.asdict(job))
    else:
        print(job.name)


@app.command("list")
def list_jobs(as_json: AsJson = False) -> None:
    """List the jobs of the project."""
    with connect("tinsmith jobs list") as client:
        found = client.jobs.list()
    if as_json:
        show_json([dataclasses.asdict(job) for job in found])
    else:
        show_list([_row(job) for job in found], _COLUMNS, as_json=False)


@app.command("describe")
def describe(name: _Name, as_json: AsJson = False) -> None:
    """Show what is wanted of a job, how far it is, and why it does not move."""
    with connect("tinsmith jobs describe") as client:
        job = client.jobs.get(name)
    if as_json:
        show_json(dataclasses.asdict(job))
        return
    for line in describe_job(job):
        print(line)


@app.command("logs")
def logs(
    name: _Name,
    role: Annotated[str, typer.Option(help="Role of the pod.")] = "driver",
    index: Annotated[int, typer.Option(help="Number of the pod within the role.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job ends.")] = False,
    tail: Annotated[int, typer.Option(help="Lines from the end; 0: all.")] = 0,
) -> None:
    """Print what a pod of a job printed."""
    with connect("tinsmith jobs logs") as client:
        for text in client.jobs.logs(name, role=role, index=index, follow=follow, tail_lines=tail):
            sys.stdout.write(text)
            sys.stdout.flush()


@app.command("cancel")
def cancel(names: _Names) -> None:
    """Save and end jobs for good."""
    with connect("tinsmith jobs cancel") as client:
        for name in names:
            print(f"cancelling {client.jobs.cancel(name).name}")


@app.command("suspend")
def suspend(names: _Names) -> None:
    """Save, give everything back that jobs hold, and let them wait."""
    with connect("tinsmith jobs suspend") as client:
        for name in names:
            print(f"suspending {client.jobs.suspend(name).name}")


@app.command("resume")
def resume(names: _Names) -> None:
    """Let suspended jobs go on from what they saved."""
    with connect("tinsmith jobs resume") as client:
        for name in names:
            print(f"resuming {client.jobs.resume(name).name}")


@app.command("retry")
def retry(names: _Names) -> None:
    """Let failed jobs go on from what they saved, by their present spec."""
    with connect("tinsmith jobs retry") as client:
        for name in names:
            print(f"{client.jobs.retry(name).name} goes on")


@app.command("delete")
def delete(names: _Names) -> None:
    """End jobs and forget them; their runs and checkpoints stay."""
    with connect("tinsmith jobs delete") as client:
        for name in names:
            client.jobs.delete(name)
            print(f"deleted {name}")


@app.command("wait")
def wait(
    name: _Name,
    timeout: Annotated[str, typer.Option(help="How long, such as 30m; for ever by default.")] = "",
    as_json: AsJson = False,
) -> None:
    """Wait until a job has ended; fail if it did not succeed."""
    with connect("tinsmith jobs wait") as client:
        job = client.jobs.wait(name, parse_duration(timeout) if timeout else None)
    if as_json:
        show_json(dataclasses.asdict(job))
    else:
        print(f"{job.name} {job.phase}{': ' + job.failure if job.failure else ''}")
    if job.phase != "Succeeded":
        raise typer.Exit(1)


def describe_job(job: JobInfo) -> list[str]:
    """Return what there is to say about a job, a line each."""
    status = job.status
    progress = status.get("progress", {})
    facts = {
        "Name": job.name,
        "Phase": job.phase or "(not reconciled yet)",
        "Waiting for": job.waiting_for,
        "Failure": job.failure,
        "Model": job.spec.get("model", {}).get("name", ""),
        "Method": job.spec.get("method", {}).get("type", ""),
        "Progress": progress.get("summary", ""),
        "ETA": progress.get("eta", ""),
        "Run": progress.get("run", ""),
        "Checkpoint": job.checkpoint,
        "Restarts": status.get("restartCount", 0) or "",
        "Nodes": status.get("nodesSummary", ""),
        "Created": f"{describe_age(job.create_time)} ago",
    }
    lines = [f"{key + ':':<13} {value}" for key, value in facts.items() if value != ""]
    lines += _table(
        "Metrics", [(each["name"], each["value"]) for each in progress.get("metrics", [])]
    )
    lines += _table(
        "Assignments",
        [
            (each["pod"], each.get("role", ""), each.get("node") or "anywhere")
            for each in status.get("assignments", [])
        ],
    )
    lines += _table(
        "Conditions",
        [
            (each["type"], each["status"], each.get("reason", ""), each.get("message", ""))
            for each in status.get("conditions", [])
        ],
    )
    spec = yaml.safe_dump(job.spec, sort_keys=False).rstrip().splitlines()
    return [*lines, "Spec:", *(f"  {line}" for line in spec)]


def _table(title: str, rows: Sequence[tuple[Any, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    return [
        f"{title}:",
        *(
            "  "
            + "  ".join(
                f"{value:<{width}}" for value, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        ),
    ]


def _row(job: JobInfo) -> _Row:
    progress = job.status.get("progress", {})
    return _Row(
        name=job.job_id,
        phase=job.phase,
        progress=progress.get("summary", ""),
        eta=progress.get("eta", ""),
        reward=progress.get("reward", ""),
        age=describe_age(job.create_time),
        waiting_for=job.waiting_for or (job.failure if job.phase == "Failed" else ""),
    )


def spec_of_recipe(
    recipe: str, model: str, steps: int, adapter: str, settings: Sequence[str]
) -> dict[str, Any]:
    """Return the spec of a job that runs a recipe.

    Args:
        recipe: A method of jobs.
        model: The base model.
        steps: Optimizer steps; 0 leaves them to the recipe.
        adapter: `lora` or `full`.
        settings: Of the recipe, each as `key=value`.

    Raises:
        ConfigurationError: If there is no such recipe, or a setting is none.
    """
    if recipe not in METHODS:
        raise ConfigurationError(
            f"there is no recipe {recipe!r}",
            remedy=f"use one of {', '.join(METHODS)}",
        )
    parameters: dict[str, Any] = {}
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigurationError(f"{word!r} is not a setting", remedy="write key=value")
        parameters[key.strip()] = parse_value(text, name=key.strip())
    roles: dict[str, Any] = {} if recipe in UNTRAINED_METHODS else {"trainer": {}}
    if recipe in SAMPLING_METHODS or recipe == "match":
        roles["sampler"] = {}
    if recipe == "match":
        names = str(parameters.pop("agents", _AGENTS)).split(",")
        roles["agents"] = [{"name": name.strip()} for name in names]
    return {
        "model": {"name": model},
        "adapter": {"type": adapter},
        "method": {
            "type": recipe,
            "parameters": parameters,
            **({"maxSteps": steps} if steps else {}),
        },
        "roles": roles,
    }
