"""The files of a recipe that the next part of a job needs, in one small value."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith.recipes.experiment.experiment import (
    FIRST_SCORES_FILES,
    OPPONENTS_FILE,
    STATE_FILE,
)
from tinsmith.recipes.experiment.run_log import METRICS

MAX_BYTES = 256 * 1024
_FILES = (STATE_FILE, OPPONENTS_FILE, *FIRST_SCORES_FILES, METRICS)


@dataclass(frozen=True, slots=True)
class DriverState:
    """What a driver keeps.

    Attributes:
        files: Contents by name.
        saves: Resource names of the saves on the way that are there, oldest first.
    """

    files: dict[str, str] = field(default_factory=dict)
    saves: Sequence[str] = ()

    @classmethod
    def collect(cls, directory: Path, saves: Sequence[str]) -> DriverState:
        """Return the state of a recipe that writes into a directory."""
        paths = [directory / name for name in _FILES]
        files = {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
        return cls(files, tuple(saves))

    @classmethod
    def decode(cls, value: bytes) -> DriverState:
        """Return a state from what `encode` made; the empty one from nothing."""
        if not value:
            return cls()
        content = json.loads(zlib.decompress(value))
        return cls(content["files"], tuple(content["saves"]))

    def encode(self) -> bytes:
        """Return it as bytes, few enough for a report: old lines of metrics are dropped first."""
        files = dict(self.files)
        while True:
            content = {"files": files, "saves": list(self.saves)}
            encoded = zlib.compress(json.dumps(content).encode())
            lines = files.get(METRICS, "").splitlines(keepends=True)
            if len(encoded) <= MAX_BYTES or not lines:
                return encoded
            files[METRICS] = "".join(lines[len(lines) // 4 + 1 :])

    def restore(self, directory: Path) -> None:
        """Write the files where the recipe looks for them."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (directory / Path(name).name).write_text(text, encoding="utf-8")
