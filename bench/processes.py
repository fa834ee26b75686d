"""Processes that answer the benchmark beside the servers that are measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tinsmith_local.process import ChildProcess


class PipedChild(ChildProcess):
    """A process that answers lines of JSON on its standard input by such lines.

    Args:
        command: Arguments after `python`.
        log: Where its stderr goes.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        variables = {"OMP_NUM_THREADS": "1"}
        super().__init__(command, log, variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, command: str, **arguments: object) -> dict[str, Any]:
        """Return the answer to a command."""
        pipe = self.started.stdin
        assert pipe is not None
        pipe.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        pipe.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next answer, such as the one that follows the start."""
        pipe = self.started.stdout
        assert pipe is not None
        if not (line := pipe.readline()):
            self.wait()
            self.check_running()
        answer: dict[str, Any] = json.loads(line)
        return answer
