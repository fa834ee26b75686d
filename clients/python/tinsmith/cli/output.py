"""Tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import rich.console
import rich.table
import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def show_list(rows: Sequence[Any], columns: Mapping[str, str], *, as_json: bool) -> None:
    """Print dataclasses.

    Args:
        rows: What to print.
        columns: Heading by field.
        as_json: Whether to print all fields as JSON.
    """
    if as_json:
        show_json([dataclasses.asdict(row) for row in rows])
        return
    table = rich.table.Table(box=None, pad_edge=False)
    for heading in columns.values():
        # A cut-off name is of no use: it is what other commands take.
        table.add_column(heading, overflow="fold", no_wrap=heading == "NAME")
    for row in rows:
        table.add_row(*(_text(getattr(row, name)) for name in columns))
    rich.console.Console().print(table)


def show_record(record: Any) -> None:
    """Print the fields of one dataclass, a line each; a list of dataclasses takes a line each."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, list):
            for entry in value:
                print(
                    f"{field.name}: {' '.join(str(v) for v in dataclasses.asdict(entry).values())}"
                )
        else:
            print(f"{field.name}: {_text(value)}")


def show_json(value: object) -> None:
    """Print a value as JSON; times in ISO 8601."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=_json_default))


def _text(value: object) -> str:
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%d %H:%M")
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _json_default(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime.datetime) else str(value)
