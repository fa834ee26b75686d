"""Docstrings and comments are plain: short sentences, whose subject is the thing described.

A sentence has at most 25 words. The words below are not used: as a subject they hide the thing that
acts ("nobody waits" instead of "the caller does not wait"). `docs/glossary.md` has the terms.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_WORDS = 25
_AVOIDED = re.compile(
    r"\b(nobody|somebody|everybody|anybody|whoever|whom|can not)\b"
    r"|\b(?<!people )(?<!those )(?<!callers )(?<!users )(?<!authors )(?<!operators )who\b",
    re.IGNORECASE,
)
_GENERATED = re.compile(r"/v1/|_pb2|proto/google/")
# Paragraphs, items of lists, and the entries of Args, Returns and Raises.
_PARAGRAPH = re.compile(r"\n\s*\n|\n\s*(?=[*\-] |\d+\. |`?[\w.]+`?(?: \(.*?\))?: |>>> )")
_SENTENCE = re.compile(r"(?<=[.!?;:])\s+")
_CODE = re.compile(r"``[^`]*``|`[^`]*`")
# Examples and tables.
_BLOCK = re.compile(r"(?m)^(?: {4,}(?=\S+ = |import |from |for |with )|>>> |\.\.\. |\|).*$")


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / line for line in listed.stdout.splitlines() if not _GENERATED.search(line))
    return [path for path in paths if path.is_file()]


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes and functions, and those below attributes."""
    bodies: list[list[ast.stmt]] = [ast.parse(source).body]
    while bodies:
        for node in bodies.pop():
            bodies += [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            bodies += [handler.body for handler in getattr(node, "handlers", [])]
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str):
                    yield (node.lineno, inspect.cleandoc(text))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a file; none if an avoided word stands nowhere behind a `#`."""
    if not any(_AVOIDED.search(line.partition("#")[2]) for line in source.splitlines()):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield (token.start[0], token.string)


def _proto_comments(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        if "//" in line:
            yield (number, line.partition("//")[2])


def problems_of(text: str) -> Iterator[str]:
    """Yield what is wrong with the words of a docstring."""
    text = _CODE.sub("x", _BLOCK.sub("", text))
    for paragraph in _PARAGRAPH.split(text):
        for sentence in _SENTENCE.split(paragraph):
            words = sentence.split()
            if len(words) > MAX_WORDS:
                yield f"{len(words)} words: {' '.join(words[:8])} …"


def avoided_words(text: str) -> Iterator[str]:
    """Yield the avoided words of a text."""
    for found in _AVOIDED.finditer(_CODE.sub("x", text)):
        yield f"says {found.group(0)!r}: name the thing that acts"


def problems(path: Path) -> list[str]:
    """Return the lines of a file whose prose is not plain, as `file:line: problem`."""
    source = path.read_text()
    found: list[tuple[int, str]] = []
    if path.suffix == ".proto":
        for line, text in _proto_comments(source):
            found += [(line, problem) for problem in avoided_words(text)]
    else:
        for line, text in _docstrings(source):
            found += [(line, problem) for problem in (*avoided_words(text), *problems_of(text))]
        for line, text in _comments(source):
            found += [(line, problem) for problem in avoided_words(text)]
    name = path.relative_to(ROOT)
    return [f"{name}:{line}: {problem}" for line, problem in sorted(found)]


@pytest.mark.parametrize(
    "folder",
    [
        "clients/python/tinsmith",
        *(
            f"services/{path.name}"
            for path in sorted((ROOT / "services").iterdir())
            if path.is_dir()
        ),
        "bench",
        "helm",
        "proto/tinsmith",
        "tests",
    ],
)
def test_prose_is_plain(folder: str) -> None:
    found = [
        problem
        for path in _tracked(f"{folder}/*.py", f"{folder}/*.proto")
        if path.name != Path(__file__).name
        for problem in problems(path)
    ]
    assert not found, "\n".join(["", *found])


def test_the_check_finds_what_it_is_for() -> None:
    assert list(avoided_words("Nobody waits."))
    assert not list(avoided_words("A caller waits."))
    assert not list(avoided_words("The word `who` in code."))
    assert list(problems_of("word " * (MAX_WORDS + 1)))
    assert not list(problems_of("word " * (MAX_WORDS - 1) + "word. Then " + "word " * 20))
