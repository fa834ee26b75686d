"""The Dockerfiles of this repository, and what they say."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREFIX = "/opt/tinsmith"
"""Where every image has its environment."""


@dataclass(frozen=True)
class Instruction:
    """A line of a Dockerfile, continuations joined."""

    word: str
    text: str
    stage: int


@dataclass(frozen=True)
class Dockerfile:
    """An image, as its file describes it."""

    pod: str
    path: Path

    @property
    def instructions(self) -> list[Instruction]:
        text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", self.path.read_text()))
        found: list[Instruction] = []
        stage = 0
        for line in filter(None, map(str.strip, text.splitlines())):
            word, _, rest = line.partition(" ")
            stage += word == "FROM"
            found.append(Instruction(word, rest.strip(), stage))
        return found

    def of(self, word: str) -> list[str]:
        """Return the texts of all instructions of a word."""
        return _texts(self.instructions, word)

    @property
    def last_stage(self) -> list[Instruction]:
        instructions = self.instructions
        return [entry for entry in instructions if entry.stage == instructions[-1].stage]

    @property
    def entry_point(self) -> list[str]:
        [text] = _texts(self.last_stage, "ENTRYPOINT")
        return list(json.loads(text))

    @property
    def installs(self) -> list[str]:
        """Commands that make the environment, in order."""
        return [text for text in self.of("RUN") if PREFIX in text]


def _texts(instructions: list[Instruction], word: str) -> list[str]:
    return [entry.text for entry in instructions if entry.word == word]


DOCKERFILES = [
    *(Dockerfile(path.parent.name, path) for path in sorted(ROOT.glob("services/*/Dockerfile"))),
    Dockerfile("driver", ROOT / "clients/python/Dockerfile"),
]


def copy_sources(instruction: str, folder: Path) -> None:
    """Do what `COPY <instruction>` does from this repository, in a folder of the image."""
    *paths, place = instruction.split()
    for path in paths:
        _copy(ROOT / path, folder / place / (Path(path).name if len(paths) > 1 else ""))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        # What .dockerignore leaves out of what it lets in.
        ignored = shutil.ignore_patterns("__pycache__", "*.py[co]")
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
