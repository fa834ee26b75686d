"""uv.lock holds what pyproject.toml asks for, the tests run with it, and every file has a hash."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages() -> dict[str, dict[str, Any]]:
    lock = tomllib.loads((_ROOT / "uv.lock").read_text())
    return {package["name"]: package for package in lock["package"]}


def test_the_lock_holds_what_the_project_asks_for(packages: dict[str, dict[str, Any]]) -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    asked = {("", Requirement(text)) for text in project["dependencies"]} | {
        (extra, Requirement(text))
        for extra, texts in project["optional-dependencies"].items()
        for text in texts
    }
    locked = packages["tinsmith"]["metadata"]
    assert set(locked["provides-extras"]) == set(project["optional-dependencies"])

    def row(extra: str, name: str, extras: set[str], versions: str) -> tuple[str, ...]:
        ordered = ",".join(sorted(filter(None, versions.split(","))))
        return extra, canonicalize_name(name), ",".join(sorted(extras)), ordered

    assert {row(extra, r.name, r.extras, str(r.specifier)) for extra, r in asked} == {
        row(
            "".join(re.findall(r"extra == '([\w-]+)'", entry.get("marker", ""))),
            entry["name"],
            set(entry.get("extras", ())),
            entry.get("specifier", ""),
        )
        for entry in locked["requires-dist"]
    }


def test_what_is_installed_is_what_the_lock_names(packages: dict[str, dict[str, Any]]) -> None:
    found = {
        canonicalize_name(distribution.metadata["Name"]): distribution.version.partition("+")[0]
        for distribution in importlib.metadata.distributions()
    }
    assert len(found) > 100
    others = {
        name: (version, packages[name]["version"])
        for name, version in found.items()
        if name in packages and version != packages[name]["version"]
    }
    assert others == {}


def test_every_file_of_the_lock_has_a_hash(packages: dict[str, dict[str, Any]]) -> None:
    for name, package in packages.items():
        if name == "tinsmith":
            continue
        assert package["source"] == {"registry": "https://pypi.org/simple"}, name
        files = [*package.get("wheels", ()), *filter(None, [package.get("sdist")])]
        assert files, name
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", file["hash"]) for file in files), name
    for path in (_ROOT / "requirements").glob("*.txt"):
        text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n", "", path.read_text()))
        assert all("--hash=sha256:" in line for line in filter(None, text.splitlines())), path
