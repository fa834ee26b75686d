"""`docs/architecture.md` names what is there, and each folder says what lives there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]*)+)`")


def _full(path: str) -> Path:
    package, _, rest = path.partition("/")
    if package == "client":
        return ROOT / "clients/python/tinsmith" / rest
    if (ROOT / "services" / package).is_dir():
        return ROOT / "services" / package / f"tinsmith_{package}" / rest
    return ROOT / path


@pytest.mark.parametrize("path", sorted(set(_PATH.findall(PAGE.read_text()))))
def test_every_path_of_the_page_exists(path: str) -> None:
    # The short form is explained with names of its own.
    assert "x.py" in path or path in ("rpc/", "store/", "adr/") or _full(path).exists()


def test_every_folder_of_a_package_says_what_lives_there() -> None:
    folders = {
        path.parent
        for root in (ROOT / "services", ROOT / "clients/python/tinsmith")
        for path in root.rglob("*.py")
        if "tinsmith" in path.parts[-2] or "tinsmith" in str(path.relative_to(ROOT))
    }
    silent = [
        str(folder.relative_to(ROOT))
        for folder in folders
        if folder.name != "v1" and not (folder / "__init__.py").read_text().startswith('"""')
    ]
    assert not silent
