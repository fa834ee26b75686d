"""`tinsmith models`. What needs torch is added by the package that brings it."""

from __future__ import annotations

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.output import AsJson, show_list

app = typer.Typer(help="List the base models that are served, and make small ones.")

_COLUMNS = {
    "base_model": "BASE MODEL",
    "trainable": "TRAINABLE",
    "sampleable": "SAMPLEABLE",
    "max_context_tokens": "CONTEXT",
    "exactness": "EXACTNESS",
    "num_parameters": "PARAMETERS",
    "reads_images": "IMAGES",
}


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the base models that are served, and what can be done with them."""
    with connect("tinsmith models list") as client:
        show_list(client.list_models(), _COLUMNS, as_json=as_json)
