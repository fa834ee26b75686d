"""`tinsmith usage`: what the project used, and its budgets."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.durations import parse_duration
from tinsmith.cli.output import AsJson, show_json, show_list, show_record

app = typer.Typer(help="Show what was used; set and list budgets.")
budgets = typer.Typer(help="Set, list and delete budgets.", no_args_is_help=True)
app.add_typer(budgets, name="budget")

_COLUMNS = {
    "num_trained_tokens": "TRAINED",
    "num_sampled_tokens": "SAMPLED",
    "num_prefilled_tokens": "PREFILLED",
    "num_cached_tokens": "CACHED",
    "engine_seconds": "ENGINE S",
    "stored_bytes": "STORED",
}
_BUDGET_COLUMNS = {
    "what": "BUDGET",
    "used": "USED",
    "limit": "LIMIT",
    "period": "PERIOD",
    "project": "PROJECT",
}


class Group(enum.StrEnum):
    """By what rows are grouped."""

    PROJECT = "project"
    RUN = "run"
    KEY = "key"
    DAY = "day"

    @property
    def column(self) -> str:
        """The field of a row."""
        return "key_id" if self is Group.KEY else self.value


class What(enum.StrEnum):
    """What a budget limits."""

    TRAINED_TOKENS = "trained-tokens"
    SAMPLED_TOKENS = "sampled-tokens"
    PREFILLED_TOKENS = "prefilled-tokens"
    ENGINE_SECONDS = "engine-seconds"
    STORED_BYTES = "stored-bytes"


class Period(enum.StrEnum):
    """When what was used begins anew."""

    TOTAL = "total"
    DAY = "day"
    MONTH = "month"


_Project = Annotated[str, typer.Option(help="Id of another project, or - for all; operators only.")]
_What = Annotated[What, typer.Argument(help="Of what.")]


@app.callback(invoke_without_command=True)
def usage(
    context: typer.Context,
    by: Annotated[
        list[Group] | None, typer.Option(help="Group rows by this; may be given several times.")
    ] = None,
    since: Annotated[
        str, typer.Option(help="How far back, such as 7d, in whole days of UTC; all if empty.")
    ] = "",
    run: Annotated[str, typer.Option(help="Only of this run.")] = "",
    key: Annotated[str, typer.Option(help="Only of the key of this id.")] = "",
    project: _Project = "",
    as_json: AsJson = False,
) -> None:
    """Show tokens trained, sampled and read, seconds of engines, and bytes of checkpoints."""
    if context.invoked_subcommand is not None:
        return
    groups = [group for group in Group if group in (by or [])]
    start = None
    if since:
        past = datetime.timedelta(seconds=parse_duration(since))
        start = datetime.datetime.now(datetime.UTC) - past
    with connect("tinsmith usage") as client:
        rows = client.usage.list(by=groups, run=run, key_id=key, start_time=start, project=project)
    columns = {group.column: group.name for group in groups}
    show_list(rows, columns | _COLUMNS, as_json=as_json)


@budgets.command("list")
def list_budgets(project: _Project = "", as_json: AsJson = False) -> None:
    """List the budgets of the project, with what was used of each."""
    with connect("tinsmith usage budget list") as client:
        show_list(client.usage.list_budgets(project=project), _BUDGET_COLUMNS, as_json=as_json)


@budgets.command("set")
def set_budget(
    what: _What,
    limit: Annotated[float, typer.Argument(help="How much; 0 refuses all.", min=0)],
    period: Annotated[Period, typer.Option(help="When it begins anew.")] = Period.TOTAL,
    project: Annotated[str, typer.Option(help="Id of the project; your own if empty.")] = "",
    as_json: AsJson = False,
) -> None:
    """Set a budget; needs a key of an operator."""
    with connect("tinsmith usage budget set") as client:
        budget = client.usage.set_budget(what, limit, period=period, project=project)
    if as_json:
        show_json(dataclasses.asdict(budget))
    else:
        show_record(budget)


@budgets.command("delete")
def delete_budget(
    what: _What,
    project: Annotated[str, typer.Option(help="Id of the project; your own if empty.")] = "",
) -> None:
    """Remove a budget; needs a key of an operator."""
    with connect("tinsmith usage budget delete") as client:
        client.usage.delete_budget(what, project=project)
    print(f"no budget of {what} any more")
