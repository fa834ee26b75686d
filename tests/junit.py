"""What pytest wrote with `--junitxml`, by node id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a run."""

    node: str
    outcome: Outcome
    seconds: float
    reason: str = ""
    """Why it was skipped, or the first line of its failure."""


def read_cases(path: Path) -> list[Case]:
    """Return the tests of a run; one whose body and whose teardown failed is there twice.

    Raises:
        FileNotFoundError: If there is no such file.
        xml.etree.ElementTree.ParseError: If it was not written to its end.
    """
    return [_case(element) for element in ElementTree.parse(path).iter("testcase")]


def _case(element: ElementTree.Element) -> Case:
    module = element.get("classname", "")
    name = element.get("name", "")
    # A file that could not be collected has its path as its name.
    node = f"{_path_of(module)}::{name}" if module else name
    seconds = float(element.get("time", 0.0))
    for tag in ("failure", "error"):
        if (problem := element.find(tag)) is not None:
            return Case(node, "failed", seconds, problem.get("message", "").partition("\n")[0])
    if (skip := element.find("skipped")) is not None:
        return Case(node, "skipped", seconds, skip.get("message", ""))
    return Case(node, "passed", seconds)


def _path_of(module: str) -> str:
    """Return `tests/unit/test_a.py` or `tests/unit/test_a.py::TestB` of a dotted name."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        path = Path(*parts[:end]).with_suffix(".py")
        if path.is_file():
            return "::".join([path.as_posix(), *parts[end:]])
    return module
