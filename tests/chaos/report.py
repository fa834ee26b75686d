"""What a scenario finds: rows of figures with targets, printed as a table and kept as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path("bench/results/chaos.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: What was counted or measured.
        value: What came out; None if the machine cannot do it, and `note` says why.
        target: What it must be.
        unit: Of value and target.
        better: `equal`, `lower` or `higher`.
        note: What a reader should know.
    """

    name: str
    value: float | None
    target: float
    unit: str = "count"
    better: str = "equal"
    note: str = ""

    @property
    def is_skipped(self) -> bool:
        """Whether nothing was measured, which is neither a pass nor a miss."""
        return self.value is None

    @property
    def is_missed(self) -> bool:
        """Whether the target was missed."""
        if self.value is None:
            return False
        if self.better == "lower":
            return self.value > self.target
        if self.better == "higher":
            return self.value < self.target
        return self.value != self.target


@dataclass(frozen=True, slots=True)
class Findings:
    """What a scenario found.

    Attributes:
        rows: Figures with targets.
        details: What was hit, and how often; for people.
        duration_s: How long it took.
    """

    rows: list[Row]
    details: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether no target was missed."""
        return not any(row.is_missed for row in self.rows)


def table(findings: Findings) -> str:
    """Return the rows and details as lines."""
    lines = [f"  {name}: {value}" for name, value in findings.details.items()]
    for row in findings.rows:
        value = "skipped" if row.value is None else f"{row.value:g}"
        sign = {"lower": "at most ", "higher": "at least "}.get(row.better, "")
        mark = "  MISSED" if row.is_missed else ""
        note = f"  ({row.note})" if row.note else ""
        lines.append(f"  {row.name:<52} {value:>8}  target {sign}{row.target:g}{mark}{note}")
    return "\n".join(lines)


def write(found: Mapping[str, Findings], *, size: str, seed: int, path: Path = RESULTS) -> None:
    """Write the figures; scenarios that did not run now keep those of their last run."""
    content = _read(path)
    names = [*found, *(name for name in content["scenarios"] if name not in found)]
    scenarios = {
        name: {
            "size": size,
            "seed": seed,
            "duration_s": round(found[name].duration_s, 1),
            "details": found[name].details,
        }
        if name in found
        else content["scenarios"][name]
        for name in sorted(names)
    }
    kept = [row for row in content["rows"] if row["name"].partition(": ")[0] not in found]
    rows = kept + [row for name in found for row in _encode(name, found[name].rows)]
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    content = {
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
        "commit": revision.stdout.strip(),
        "scenarios": scenarios,
        "rows": sorted(rows, key=lambda row: str(row["name"]).partition(": ")[0]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _encode(scenario: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    encoded = []
    for row in rows:
        values = dataclasses.asdict(row)
        if not row.note:
            del values["note"]
        encoded.append({**values, "name": f"{scenario}: {row.name}"})
    return encoded


def _read(path: Path) -> dict[str, Any]:
    """Return the figures of the last run, if they are of this form."""
    if path.is_file():
        content = json.loads(path.read_text())
        if "scenarios" in content:
            return dict(content)
    return {"scenarios": {}, "rows": []}
