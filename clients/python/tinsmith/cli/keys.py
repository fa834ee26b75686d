"""`tinsmith keys`."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.durations import parse_duration
from tinsmith.cli.output import AsJson, show_json, show_list, show_record
from tinsmith.episodes.agent import openai_base_url

app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)

_COLUMNS = {
    "name": "NAME",
    "state": "STATE",
    "role": "ROLE",
    "display_name": "DISPLAY NAME",
    "create_time": "AGE",
    "expire_time": "EXPIRES",
}


class Role(enum.StrEnum):
    """What a key may do."""

    VIEWER = "viewer"
    AGENT = "agent"
    MEMBER = "member"
    ADMIN = "admin"


_Project = Annotated[str, typer.Option(help="Id of another project; operators only.")]


@app.command("create")
def create_key(
    display_name: Annotated[str, typer.Option("--for", help="What it is for.")] = "",
    role: Annotated[Role, typer.Option(help="What it may do.")] = Role.MEMBER,
    expires_in: Annotated[str, typer.Option(help="Its life, such as 30d; no end if empty.")] = "",
    project: _Project = "",
    as_json: AsJson = False,
) -> None:
    """Create a key, and show it once, as gRPC clients and as Tinker's clients spell it."""
    with connect("tinsmith keys create") as client:
        key = client.keys.create(
            role=role.value,
            ttl_seconds=parse_duration(expires_in) if expires_in else None,
            display_name=display_name,
            project=project,
        )
        address = client.address
    url = openai_base_url(address).removesuffix("/v1")
    if as_json:
        show_json(dataclasses.asdict(key))
    else:
        show_record(key)
        print("\n# For whoever gets it, to paste into a terminal:")
        print(f"export TINSMITH_ADDRESS={address} TINSMITH_API_KEY={key.secret}")
        print(f"export TINKER_BASE_URL={url} TINKER_API_KEY={key.tinker_secret}")


@app.command("list")
def list_keys(project: _Project = "", as_json: AsJson = False) -> None:
    """List the keys of the project, newest first, without their secrets."""
    with connect("tinsmith keys list") as client:
        show_list(client.keys.list(project=project), _COLUMNS, as_json=as_json)


@app.command("revoke")
def revoke_keys(
    names: Annotated[list[str], typer.Argument(help="Resource names or ids.")],
    project: _Project = "",
) -> None:
    """Refuse keys from now on."""
    with connect("tinsmith keys revoke") as client:
        for name in names:
            print(f"revoked {client.keys.revoke(name, project=project).name}")
