"""The one Dockerfile of this repository, and the image that it makes for each pod."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "services/Dockerfile"
PREFIX = "/opt/tinsmith"
"""Where every image has its environment."""
BUILD_PREFIX = "/opt/build"
"""Where the first stage has what installs and builds it."""


@dataclass(frozen=True)
class Instruction:
    """A line of a Dockerfile, continuations joined."""

    word: str
    text: str
    stage: int


@dataclass(frozen=True)
class Image:
    """An image, as the Dockerfile describes it to those who give it these arguments."""

    pod: str
    arguments: dict[str, str]

    @property
    def instructions(self) -> list[Instruction]:
        text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text()))
        found: list[Instruction] = []
        stage = 0
        for line in filter(None, map(str.strip, text.splitlines())):
            word, _, rest = line.partition(" ")
            stage += word == "FROM"
            found.append(Instruction(word, rest.strip(), stage))
        return found

    @property
    def extras(self) -> list[str]:
        """Extras that are installed; none for the client alone."""
        return list(filter(None, self.arguments.get("EXTRA", self.pod).split(",")))

    @property
    def module(self) -> str:
        """What the entry point runs."""
        return self.arguments.get("MODULE", f"tinsmith_{self.pod}")

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
        built = [entry for entry in self.instructions if entry.stage < self.last_stage[0].stage]
        return [text for text in _texts(built, "RUN") if PREFIX in text or BUILD_PREFIX in text]


def _texts(instructions: list[Instruction], word: str) -> list[str]:
    return [entry.text for entry in instructions if entry.word == word]


def _images() -> list[Image]:
    """Return the images that `make images` builds, with the arguments that it gives."""
    makefile = (ROOT / "Makefile").read_text()
    [pods] = re.findall(r"(?m)^IMAGES \?= (.*)$", makefile)
    given = dict(re.findall(r"(?m)^IMAGE_ARGS_(\w+) := (.*)$", makefile))
    assert set(given) <= set(pods.split())
    return [
        Image(pod, dict(each.split("=", 1) for each in [f"POD={pod}", *given.get(pod, "").split()]))
        for pod in sorted(pods.split())
    ]


IMAGES = _images()


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
