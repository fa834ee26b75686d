"""A file that a docstring, a comment or a page of decisions names by itself is there."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([a-z_]\w*\.py)`")
PLACEHOLDERS = frozenset({"my.py", "setup.py"})


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def package_of(path: str) -> str:
    """Return the folder within which a module is known by its name alone."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "services" else parts[0]


def test_a_file_that_is_named_alone_is_in_the_same_package() -> None:
    files = tracked()
    there = defaultdict(set)
    for path in files:
        there[package_of(path)].add(Path(path).name)
        there["everywhere"].add(Path(path).name)
    wrong = []
    for path in files:
        is_decision = path.startswith("docs/adr/")
        if not is_decision and (not path.endswith(".py") or "/v1/" in path):
            continue
        # A decision says what was decided anywhere; a package that others read names theirs.
        known = there["everywhere" if is_decision or path.startswith("helm/") else package_of(path)]
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            wrong += [
                f"{path}:{number}: {name}"
                for name in NAMED.findall(line)
                if name not in known and name not in PLACEHOLDERS
            ]
    assert not wrong
