"""`tinsmith models`. What needs torch is added by the package that brings it."""

from __future__ import annotations

import dataclasses

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.output import AsJson, fields_of, show_list
from tinsmith.local_servers import model_sources
from tinsmith.settings import state_dir
from tinsmith.types import ModelInfo

app = typer.Typer(help="List the base models that are served, and make small ones.")

_COLUMNS = {
    "base_model": "BASE MODEL",
    "trainable": "TRAINABLE",
    "sampleable": "SAMPLEABLE",
    "max_context_tokens": "CONTEXT",
    "exactness": "EXACTNESS",
    "num_parameters": "PARAMETERS",
    "reads_images": "IMAGES",
    "source": "SOURCE",
}


@dataclasses.dataclass(frozen=True, slots=True)
class _ListedModel(ModelInfo):
    """A base model, and the folder or hub id that a server of this machine loads it from."""

    source: str = ""


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the base models that are served, and what can be done with them.

    Of a server of your own on this machine, it shows the folder or hub id of each, too.
    """
    with connect("tinsmith models list") as client:
        sources = model_sources(state_dir(), client.origin.address)
        rows = [
            _ListedModel(**fields_of(model), source=sources.get(model.base_model, ""))
            for model in client.list_models()
        ]
        show_list(rows, _COLUMNS, as_json=as_json)
