"""`tinsmith checkpoints`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import rich.console
import rich.progress
import typer

from tinsmith.checkpoints.tasks import Progress
from tinsmith.cli.connection import connect
from tinsmith.cli.durations import parse_duration
from tinsmith.cli.output import AsJson, show_json, show_list, show_record
from tinsmith.local_servers import model_sources
from tinsmith.settings import state_dir
from tinsmith.types import Checkpoint, CheckpointExport

app = typer.Typer(help="Work with checkpoints.", no_args_is_help=True)

_COLUMNS = {
    "name": "NAME",
    "kind": "KIND",
    "base_model": "BASE MODEL",
    "version": "VERSION",
    "size_bytes": "SIZE",
    "is_published": "PUBLISHED",
    "create_time": "AGE",
    "expire_time": "EXPIRES",
}

_Name = Annotated[str, typer.Argument(help="A checkpoint: run-1/final, or its resource name.")]
_Ttl = Annotated[str, typer.Option(help="Delete it after this time, such as 90s, 12h or 7d.")]


@app.command("list")
def list_checkpoints(
    run: Annotated[str | None, typer.Option(help="Name or id of a run; all by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """List checkpoints, newest first."""
    with connect("tinsmith checkpoints list") as client:
        show_list(client.checkpoints.list(run), _COLUMNS, as_json=as_json)


@app.command("info")
def info(name: _Name, as_json: AsJson = False) -> None:
    """Show a checkpoint with its files."""
    with connect("tinsmith checkpoints info") as client:
        _show(client.checkpoints.get(name), as_json=as_json)


@app.command("publish")
def publish(name: _Name, as_json: AsJson = False) -> None:
    """Let every project load, sample and copy a checkpoint by its name."""
    with connect("tinsmith checkpoints publish") as client:
        _show(client.checkpoints.publish(name), as_json=as_json)


@app.command("unpublish")
def unpublish(name: _Name, as_json: AsJson = False) -> None:
    """Keep other projects from reading a checkpoint from now on."""
    with connect("tinsmith checkpoints unpublish") as client:
        _show(client.checkpoints.unpublish(name), as_json=as_json)


@app.command("set-ttl")
def set_ttl(
    name: _Name,
    ttl: Annotated[str, typer.Argument(help="Time from now, such as 90s, 12h or 7d; or never.")],
    as_json: AsJson = False,
) -> None:
    """Say when a checkpoint is deleted."""
    is_kept = ttl == "never"
    ttl_s = None if is_kept else parse_duration(ttl)
    with connect("tinsmith checkpoints set-ttl") as client:
        _show(
            client.checkpoints.update(name, ttl_seconds=ttl_s, keep=is_kept),
            as_json=as_json,
        )


@app.command("copy")
def copy(
    source: Annotated[str, typer.Argument(help="Checkpoint of this project, or published.")],
    run: Annotated[str, typer.Argument(help="Name or id of the run that gets the copy.")],
    checkpoint_id: Annotated[str, typer.Argument(help="Id of the copy within the run.")],
    ttl: _Ttl = "",
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint into a run of this project."""
    ttl_s = parse_duration(ttl) if ttl else None
    with (
        connect("tinsmith checkpoints copy") as client,
        _bar("copying", is_shown=not as_json) as progress,
    ):
        copied = client.checkpoints.copy(
            source,
            run,
            checkpoint_id,
            ttl_seconds=ttl_s,
            progress=progress,
        ).result()
    _show(copied, as_json=as_json)


@app.command("delete")
def delete_checkpoints(
    names: Annotated[list[str], typer.Argument(help="Resource names.")],
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints, their exports and files."""
    with connect("tinsmith checkpoints delete") as client:
        for name in names:
            client.checkpoints.delete(name)
            if not as_json:
                print(f"deleted {name}")
    if as_json:
        show_json({"deleted": names})


@app.command("export")
def export(
    name: _Name,
    export_format: Annotated[
        str, typer.Option("--format", help="peft: the adapter; merged: a whole model.")
    ] = "peft",
    output: Annotated[Path | None, typer.Option(help="Download it to this folder too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in the layout of PEFT or transformers."""
    with connect("tinsmith checkpoints export") as client:
        with _bar("exporting", is_shown=not as_json) as progress:
            made = client.checkpoints.export(name, export_format, progress=progress).result()
        if output is not None:
            with _bar("downloading", is_shown=not as_json) as progress:
                client.checkpoints.download(made, output, progress=progress)
            sources = model_sources(state_dir(), client.origin.address)
    _show(made, as_json=as_json)
    if output is not None:
        base = _name_base_model(output, sources) if export_format == "peft" else ""
        if not as_json:
            print(f"written to {output}; load it with:")
            for line in _loading_lines(export_format, output, base):
                print(f"  {line}")


def _name_base_model(folder: Path, sources: Mapping[str, str]) -> str:
    """Write where the base model lies into an adapter that was downloaded, and return that.

    The server writes its own name of the model, since its folders mean nothing elsewhere. On its
    machine they do, and `AutoPeftModelForCausalLM` finds the model by them.

    Returns:
        Folder or hub id of the base model; empty if it is not known here.
    """
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    source = sources.get(settings.get("base_model_name_or_path", ""), "")
    if source:
        settings["base_model_name_or_path"] = source
        path.write_text(json.dumps(settings, indent=1, sort_keys=True), encoding="utf-8")
    return source


def _loading_lines(export_format: str, folder: Path, base: str) -> list[str]:
    """Return the Python that loads an export.

    Args:
        export_format: `peft` or `merged`.
        folder: Where it is.
        base: Folder or hub id of the base model; empty if it is not known here.
    """
    if export_format == "merged":
        return [
            "from transformers import AutoModelForCausalLM",
            f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})",
        ]
    if base:
        return [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            f"model = AutoModelForCausalLM.from_pretrained({base!r})",
            f"model = PeftModel.from_pretrained(model, {str(folder)!r})",
        ]
    return [
        "from peft import PeftModel  # model: the base model, by AutoModelForCausalLM",
        f"model = PeftModel.from_pretrained(model, {str(folder)!r})",
    ]


@app.command("download")
def download(
    name: Annotated[str, typer.Argument(help="Resource name of a checkpoint or an export.")],
    folder: Annotated[Path, typer.Argument(help="Where the files go; repeat it to go on.")],
    as_json: AsJson = False,
) -> None:
    """Fetch the files of a checkpoint or export, verified by hash."""
    with (
        connect("tinsmith checkpoints download") as client,
        _bar("downloading", is_shown=not as_json) as progress,
    ):
        paths = client.checkpoints.download(name, folder, progress=progress)
    if as_json:
        show_json({"name": name, "files": [str(path) for path in paths]})
    else:
        for path in paths:
            print(path)


@app.command("import")
def import_adapter(
    folder: Annotated[Path, typer.Argument(help="Folder of a PEFT adapter.")],
    run: Annotated[str, typer.Argument(help="Name or id of the run that gets the checkpoint.")],
    checkpoint_id: Annotated[str, typer.Argument(help="Id of the checkpoint within the run.")],
    ttl: _Ttl = "",
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of a PEFT adapter."""
    ttl_s = parse_duration(ttl) if ttl else None
    with (
        connect("tinsmith checkpoints import") as client,
        _bar("sending", is_shown=not as_json) as progress,
    ):
        made = client.checkpoints.import_adapter(
            folder, run, checkpoint_id, ttl_seconds=ttl_s, progress=progress
        )
    _show(made, as_json=as_json)


def _show(value: Checkpoint | CheckpointExport, *, as_json: bool) -> None:
    if as_json:
        show_json(dataclasses.asdict(value))
    else:
        show_record(value)


@contextmanager
def _bar(what: str, *, is_shown: bool) -> Iterator[Progress]:
    """Show a progress bar on stderr while the context lasts."""
    console = rich.console.Console(stderr=True)
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        # Where there is no terminal even an empty bar leaves a line.
        disable=not is_shown or not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
