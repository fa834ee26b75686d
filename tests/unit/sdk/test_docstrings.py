"""Each public call of the SDK says what it returns, what it raises, and shows a use.

A call is written once, in a `*_calls.py`; its generated forms take the docstring over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinsmith

ROOT = Path(tinsmith.__file__).parent
SOURCES = [*sorted(ROOT.rglob("*_calls.py")), ROOT / "client.py", ROOT / "episodes" / "agent.py"]
FORMS = {"call", "future", "submits", "awaited"}
TALKS = re.compile(r"\.background\.(call|acall|iterate)\(|\.submit\(|_core\.future\(")
"""What a method that is no form reaches the server with."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def decorators(function: Function) -> set[str]:
    return {ast.unparse(each).partition("(")[0] for each in function.decorator_list}


def calls() -> Iterator[tuple[str, Function]]:
    """Yield the public methods that are no properties, by class and name."""
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            for each in node.body:
                if not isinstance(each, Function) or "property" in decorators(each):
                    continue
                if not each.name.startswith("_") or decorators(each) & FORMS:
                    yield f"{node.name}.{each.name.lstrip('_')}", each


CALLS = dict(calls())


def test_the_calls_are_found() -> None:
    assert {"TrainingRunCalls.forward_backward", "KeyCalls.create", "Client.close"} <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_what_it_gives_and_what_goes_wrong(name: str) -> None:
    function = CALLS[name]
    text = ast.get_docstring(function) or ""
    if text.startswith("Do as `"):
        # The form for asyncio of a call that is written out.
        return
    returned = ast.unparse(function.returns) if function.returns else "None"
    wanted = [] if returned in ("None", "Self") else ["Returns:"]
    is_form = bool(decorators(function) & FORMS)
    if is_form or TALKS.search(ast.unparse(function)):
        wanted.append("Raises:")
    if is_form:
        wanted.append("Example:")
    sections = {line.strip() for line in text.splitlines()}
    if "Yields:" in sections:
        sections.add("Returns:")
    assert [each for each in wanted if each not in sections] == []
