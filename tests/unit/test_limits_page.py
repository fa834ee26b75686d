"""Each row of the page of limits says what shares a bound."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MEASURED = "## Time of others, measured"
"""Heads the table behind those of the bounds."""


def test_each_row_says_of_whom_it_is() -> None:
    whom = {"one", "connection", "address", "project", "process", "all"}
    rows = [
        [cell.strip() for cell in line.replace("\\|", "").strip("|\n ").split("|")]
        for line in (DOCS / "limits.md").read_text().partition(MEASURED)[0].splitlines()
        if line.startswith("| ") and not line.startswith(("| what", "| ---"))
    ]
    assert len(rows) > 200
    assert [row for row in rows if len(row) != 5 or row[2] not in whom] == []
    # What counts a project's own has that word in its name.
    wrong = [row for row in rows if "_PER_PROJECT" in row[3] and row[2] != "project"]
    assert wrong == []
