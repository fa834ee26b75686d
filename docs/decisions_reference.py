"""The list of decisions, by the numbers and titles of `docs/adr`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from docs.descriptors import ROOT

_HEAD = """# Decisions

One page for each choice that would cost more than a day to undo: context, decision,
alternatives, cost.

| number | decision |
| --- | --- |
"""


def pages() -> Mapping[str, str]:
    """Return the page by its name below the folder of references."""
    rows = []
    for path in sorted((ROOT / "docs/adr").glob("*.md")):
        found = re.match(r"# (?:ADR )?(\d+)[.:] (.+)", path.read_text(encoding="utf-8"))
        assert found is not None, f"{path} does not begin with its number and title"
        rows.append(f"| {int(found[1])} | [{found[2]}](../adr/{path.name}) |\n")
    return {"decisions.md": _HEAD + "".join(rows)}
