"""`tinsmith checkpoints`."""

from __future__ import annotations

from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.output import AsJson, show_list

app = typer.Typer(help="List and delete checkpoints.", no_args_is_help=True)

_COLUMNS = {
    "name": "NAME",
    "kind": "KIND",
    "base_model": "BASE MODEL",
    "version": "VERSION",
    "size_bytes": "BYTES",
    "create_time": "CREATED",
}


@app.command("list")
def list_checkpoints(
    run: Annotated[str | None, typer.Option(help="Name or id of a run; all by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """List checkpoints, newest first."""
    with connect("tinsmith checkpoints list") as client:
        show_list(client.list_checkpoints(run), _COLUMNS, as_json=as_json)


@app.command("delete")
def delete_checkpoints(
    names: Annotated[list[str], typer.Argument(help="Resource names.")],
) -> None:
    """Delete checkpoints and their files."""
    with connect("tinsmith checkpoints delete") as client:
        for name in names:
            client.delete_checkpoint(name)
            print(f"deleted {name}")
