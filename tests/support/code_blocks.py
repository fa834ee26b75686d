"""The code blocks of the documentation, and what the comments above them say of running them.

A block of Python, Bash or console is run, unless the line above its fence says otherwise:

    <!-- not run: the reason -->
    <!-- run by: tests/file.py::test -->       that test reads the block and runs it
    <!-- tested by: tests/file.py::test -->    that test makes the same calls

`<!-- fails -->` above a console block says that its last command ends with an error. A block in a
comment of the form `<!-- setup ... -->` is Python that is run, and not shown. A console block has
commands behind `$`, their further lines behind `>`, and what they print. There `...` is anything
within its line; alone on a line it is any number of lines, also none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = "python"
SHELL = frozenset({"bash", "sh", "console"})
# Languages whose blocks are data, output or expressions, and nothing to run.
SHOWN = frozenset({"text", "json", "yaml", "toml", "promql", "proto", "pycon", ""})
_BLOCK = re.compile(
    r"(?ms)^(?:<!-- (?P<note>(?!setup)[^\n]*?) -->\n)?"
    r"```(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^```\s*?$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->"
)
_NOTE = re.compile(r"(?P<kind>not run|run by|tested by|fails)(?:: (?P<what>.+))?")


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a page.

    Attributes:
        page: Path of the page below the root of the repository.
        line: Line of its fence.
        language: The word behind the fence; `python` for a setup.
        code: What stands between the fences.
        note: The kind of the comment above it, such as `not run`; empty if there is none.
        what: What the comment says.
    """

    page: str
    line: int
    language: str
    code: str
    note: str = ""
    what: str = ""

    @property
    def is_run(self) -> bool:
        """Whether the tests of pages run it."""
        return self.language in {PYTHON, *SHELL} and self.note in {"", "fails"}


def pages() -> list[str]:
    """Return the pages that people write, below the root of the repository."""
    written = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    found = [path for path in written if path.is_file()]
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if "reference" not in path.relative_to(ROOT / "docs").parts:
            found.append(path)
    return [path.relative_to(ROOT).as_posix() for path in found]


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page from top to bottom.

    Raises:
        ValueError: If the comment above a block is none of those that are known.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["setup"] is not None:
            yield Block(page, line, PYTHON, found["setup"])
            continue
        note = _NOTE.fullmatch(found["note"] or "")
        if found["note"] and note is None:
            raise ValueError(f"{page}:{line}: no comment of a block: {found['note']}")
        kind, what = (note["kind"], note["what"] or "") if note else ("", "")
        yield Block(page, line, found["language"], found["code"], kind, what)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block, and what the page shows of its output."""

    text: str
    shown: str

    def prints(self, output: str) -> bool:
        """Return whether an output is the one that is shown."""
        pattern = "".join(
            r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*?") + r"\n"
            for line in _lines(self.shown)
        )
        return re.fullmatch(pattern, "".join(f"{line}\n" for line in _lines(output))) is not None


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a block; a block of Bash is one command, whose output is not shown."""
    if block.language != "console":
        return [Command(block.code, "...")]
    commands: list[list[str]] = []
    for line in block.code.splitlines(keepends=True):
        if line.startswith("$ "):
            commands.append([line[2:], ""])
        elif line.startswith("> "):
            commands[-1][0] += line[2:]
        else:
            commands[-1][1] += line
    return [Command(text, shown) for text, shown in commands]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
