"""`tinsmith sessions` and `tinsmith audit`: the clients of a project, and what was done in it."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.durations import parse_duration
from tinsmith.cli.output import AsJson, show_json, show_list, show_record

app = typer.Typer(help="List the sessions of clients.", no_args_is_help=True)

_COLUMNS = {
    "name": "NAME",
    "state": "STATE",
    "outcome": "OUTCOME",
    "display_name": "DISPLAY NAME",
    "create_time": "AGE",
}
_EVENT_COLUMNS = {"time": "AGE", "action": "ACTION", "resource": "RESOURCE", "key_id": "KEY"}


@app.command("list")
def list_sessions(
    is_active: Annotated[
        bool, typer.Option("--active", help="Leave out those that ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the sessions of the project, newest first."""
    with connect("tinsmith sessions list") as client:
        rows = [each for each in client.sessions.list() if each.state == "active" or not is_active]
        show_list(rows, _COLUMNS, as_json=as_json)


@app.command("show")
def show_session(
    name: Annotated[str, typer.Argument(help="Resource name or id.")], as_json: AsJson = False
) -> None:
    """Show a session with the runs that were created in it."""
    with connect("tinsmith sessions show") as client:
        session = client.sessions.get(name)
    if as_json:
        show_json(session)
    else:
        show_record(session)


def audit(
    since: Annotated[str, typer.Option(help="How far back, such as 12h or 7d.")] = "7d",
    action: Annotated[str, typer.Option(help="Only this action, such as delete_run.")] = "",
    as_json: AsJson = False,
) -> None:
    """List what was done to keys, sessions, runs and checkpoints; needs a key of an admin."""
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=parse_duration(since))
    with connect("tinsmith audit") as client:
        events = client.audit.list(start_time=start)
    rows = [event for event in events if action in ("", event.action)]
    show_list(rows, _EVENT_COLUMNS, as_json=as_json)
