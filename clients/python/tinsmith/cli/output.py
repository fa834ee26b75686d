"""Tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from tinsmith.names import shorten

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

Watch = Annotated[bool, typer.Option("--watch", help="Show it again every 2 s, until Ctrl-C.")]

_WATCH_INTERVAL_S = 2.0
_CLEAR_SCREEN = "\x1b[H\x1b[2J"
_GAP = "  "
_LEAST_WIDTH = 6
_SECONDS_SHOWN = 10
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"))


def repeated(watch: bool) -> Iterator[None]:
    """Yield once, or again and again on a screen that is cleared, until Ctrl-C."""
    yield
    while watch:
        time.sleep(_WATCH_INTERVAL_S)
        if sys.stdout.isatty():
            print(_CLEAR_SCREEN, end="")
        yield


def show_list(rows: Sequence[Any], columns: Mapping[str, str], *, as_json: bool) -> None:
    """Print dataclasses, a line each: on a terminal no wider than it is, else as wide as they are.

    The first column is never cut: it is what other commands take.

    Args:
        rows: What to print.
        columns: Heading by field.
        as_json: Whether to print all fields as JSON.
    """
    if as_json:
        show_json([dataclasses.asdict(row) for row in rows])
        return
    cells = [[_cell(name, getattr(row, name)) for name in columns] for row in rows]
    table = [list(columns.values()), *cells]
    widths = [max(len(line[column]) for line in table) for column in range(len(columns))]
    if sys.stdout.isatty():
        # What no row has would only take room; a pipe keeps its columns.
        kept = [c for c in range(len(columns)) if c == 0 or any(line[c] for line in cells)]
        table = [[line[c] for c in kept] for line in table]
        widths = [widths[c] for c in kept]
        _narrow(widths, shutil.get_terminal_size().columns)
    for line in table:
        print(
            _GAP.join(
                _cut(cell, width).ljust(width) for cell, width in zip(line, widths, strict=True)
            ).rstrip()
        )


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are, for one that has further ones."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def show_record(record: Any, *, leave_out: str = "") -> None:
    """Print the fields of one dataclass, a line each; a list of dataclasses takes a line each."""
    for field in dataclasses.fields(record):
        if field.name == leave_out:
            continue
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


def describe_age(when: datetime.datetime | None) -> str:
    """Return how long ago a time was, such as `3m`, or how far away it is, such as `in 7d`."""
    if when is None:
        return ""
    seconds = (datetime.datetime.now(datetime.UTC) - when).total_seconds()
    # A moment ago by one clock is in a moment by another.
    prefix = "in " if seconds < -1 else ""
    seconds = abs(seconds)
    for size_s, unit in _UNITS:
        if seconds >= size_s:
            return f"{prefix}{int(seconds // size_s)}{unit}"
    return f"{prefix}{int(seconds)}s"


def describe_seconds(seconds: float) -> str:
    """Return a span such as `0.4 s`, `12 s`, `3 m` or `2.5 h`."""
    if seconds < _SECONDS_SHOWN:
        return f"{seconds:.2g} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} m" if seconds >= 2 * 60 else f"{seconds:.0f} s"
    return f"{seconds / 3600:.1f} h"


def _narrow(widths: list[int], limit: int) -> None:
    """Take room from the widest column but the first, until all fit or none can give any."""
    while sum(widths) + len(_GAP) * (len(widths) - 1) > limit:
        widest = max(range(1, len(widths)), key=lambda column: widths[column])
        if widths[widest] <= _LEAST_WIDTH:
            return
        widths[widest] -= 1


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _cell(name: str, value: object) -> str:
    if isinstance(value, datetime.datetime):
        return describe_age(value)
    if name in ("name", "resource", "run"):
        return shorten(str(value))
    if name.endswith("_bytes") and isinstance(value, int):
        return describe_size(value)
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.6g}"
    return " ".join(_text(value).split())


def describe_size(num_bytes: int) -> str:
    """Return a size such as `2.8 MB`."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _text(value: object) -> str:
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%d %H:%M")
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _json_default(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.isoformat() if isinstance(value, datetime.datetime) else str(value)
