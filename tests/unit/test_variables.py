"""The page of environment variables lists what the code reads, all with one prefix."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "variables.md").read_text()
SOURCES = [*(ROOT / "clients").rglob("*.py"), *(ROOT / "services").rglob("*.py")]
# Names in prose and beginnings of names: what follows is a setting, or an agent.
PREFIXES = {"TINSMITH_", "TINSMITH_S3_", "TINSMITH_AGENT_"}
# What others define: the conventions of home folders, of torch, and of WSGI.
FOREIGN = {
    "NO_PROXY",
    "XDG_CACHE_HOME",
    "PATH_INFO",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "TORCHELASTIC_RESTART_COUNT",
}


def test_each_variable_of_ours_is_on_the_page() -> None:
    named = {
        name
        for path in SOURCES
        for name in re.findall(r"\bTINSMITH_[A-Z0-9_]*", path.read_text())
        if name not in PREFIXES
    }
    assert named
    assert {name for name in named if f"`{name}`" not in PAGE} == set()


def test_what_is_read_has_our_prefix() -> None:
    read = {
        name
        for path in SOURCES
        for name in re.findall(
            r"""environ(?:\.get\(|\[)\s*["']([A-Z0-9_]+)["']""", path.read_text()
        )
    }
    assert {name for name in read - FOREIGN if not name.startswith("TINSMITH_")} == set()
