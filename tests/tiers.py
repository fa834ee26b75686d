"""Which tier each test belongs to: the tables `tiers.toml` and `quarantine.toml`, read and applied.

Tests of the folders that `make test` collects have exactly one tier, as a marker; tests elsewhere
run by targets of their own and have none. A test in quarantine has that marker instead, wherever it
lies.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
TIERED = ("tests/unit/", "tests/contract/", "tests/integration/")
TIERS = ("gate", "processes", "heavy", "learning")
QUARANTINE = "quarantine"
MAX_QUARANTINED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """A test that failed once without a cause in the change that met it."""

    node: str
    """Its node id, or the beginning of several."""
    owner: str
    """The part of the project whose people find the cause."""
    since: date
    until: date
    seen: str
    """What failed, in how many runs."""
    suspicion: str


@dataclass(frozen=True, slots=True)
class Tiers:
    """The two tables."""

    lines: dict[str, str]
    """Beginning of node ids, in which `*` stands for any text, to tier."""
    quarantined: tuple[Quarantined, ...]

    def line_of(self, node: str) -> str | None:
        """Return the line of the tables that decides about a test, if one does."""
        for names in (tuple(entry.node for entry in self.quarantined), tuple(self.lines)):
            lines, pattern = _longest_first(names)
            match = pattern.match(node)
            if match is not None and match.lastindex is not None:
                return lines[match.lastindex - 1]
        return None

    def tier_of(self, node: str) -> str | None:
        """Return the tier of a test; None if it runs by a target of its own."""
        line = self.line_of(node)
        if line is not None:
            return self.lines.get(line, QUARANTINE)
        return "gate" if node.startswith(TIERED) else None

    def unused_lines(self, nodes: Iterable[str]) -> list[str]:
        """Return the lines that decide about no test, of files that tests were collected from."""
        nodes = list(nodes)
        files = {node.partition("::")[0] for node in nodes}
        used = {self.line_of(node) for node in nodes}
        return sorted(
            line
            for line in [*self.lines, *(entry.node for entry in self.quarantined)]
            if line not in used and any(file.startswith(line.partition("::")[0]) for file in files)
        )


# Thousands of nodes are held against a hundred lines: one expression is quicker than a loop.
@cache
def _longest_first(names: tuple[str, ...]) -> tuple[list[str], re.Pattern[str]]:
    lines = sorted(names, key=len, reverse=True)
    choices = (".*".join(map(re.escape, line.split("*"))) for line in lines)
    return lines, re.compile("|".join(f"({choice})" for choice in choices) or r"(?!)")


def read_tiers(folder: Path = TESTS) -> Tiers:
    """Return what the tables say.

    Raises:
        ValueError: If a line stands twice, or names a tier that there is not.
    """
    lines: dict[str, str] = {}
    for tier, nodes in tomllib.loads((folder / "tiers.toml").read_text()).items():
        if tier not in TIERS:
            raise ValueError(f"tiers.toml: there is no tier {tier}; there are {', '.join(TIERS)}")
        for node in nodes:
            if node in lines:
                raise ValueError(f"tiers.toml: {node} stands in {lines[node]} and in {tier}")
            lines[node] = tier
    entries = tomllib.loads((folder / "quarantine.toml").read_text()).get("test", [])
    return Tiers(lines, tuple(Quarantined(**entry) for entry in entries))
