"""Results as rows: `bench/results/<name>.json`, and the same as a table."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console
from rich.table import Table

RESULTS_DIR = Path(__file__).parent / "results"

Better = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: What was measured.
        value: The median of the repeats.
        unit: Of the value.
        better: Which direction is good.
        target: What it should reach; None for a figure that only explains others.
        spread: Lowest and highest of the repeats; None for a single measurement.
    """

    name: str
    value: float
    unit: str
    better: Better
    target: float | None = None
    spread: tuple[float, float] | None = None

    @classmethod
    def of(
        cls,
        name: str,
        values: Sequence[float],
        unit: str,
        better: Better,
        *,
        target: float | None = None,
    ) -> Self:
        """Return the row of several repeats, rounded to four significant digits.

        Raises:
            ValueError: If there are none.
        """
        if not values:
            raise ValueError(f"no measurement of {name}")
        ordered = sorted(values)
        return cls(
            name=name,
            value=_round(statistics.median(ordered)),
            unit=unit,
            better=better,
            target=target,
            spread=(_round(ordered[0]), _round(ordered[-1])) if len(ordered) > 1 else None,
        )

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        is_higher = self.better == "higher"
        return self.value >= self.target if is_higher else self.value <= self.target


def write(name: str, rows: Sequence[Row], machine: Mapping[str, Any]) -> Path:
    """Write the rows to `bench/results/<name>.json` and return its path."""
    content = {
        "machine": dict(machine),
        "commit": commit(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path = RESULTS_DIR / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def show(title: str, rows: Sequence[Row], machine: Mapping[str, Any]) -> None:
    """Print the rows as a table."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "median", "unit", "spread", "target", ""):
        table.add_column(heading, justify="right" if heading in ("median", "target") else "left")
    verdicts = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}
    signs = {"higher": ">=", "lower": "<="}
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:g}",
            row.unit,
            "" if row.spread is None else f"{row.spread[0]:g} .. {row.spread[1]:g}",
            "" if row.target is None else f"{signs[row.better]} {row.target:g}",
            verdicts[row.is_met],
        )
    # A pipe has no width; 80 columns would break the names.
    console = Console(highlight=False, width=None if Console().is_terminal else 130)
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), soft_wrap=True)


def machine() -> dict[str, Any]:
    """Return what is known of this machine."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
    }


def commit() -> str:
    """Return the short commit of the repository, with `+` if files were changed since."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    is_changed = bool(git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no"))
    return git("rev-parse", "--short", "HEAD") + ("+" if is_changed else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _round(value: float) -> float:
    return float(f"{value:.4g}")
