"""Runs a scenario on several processes: `python -m tests.unit.engine.distributed.group ...`.

A scenario is a function of `scenarios.py`; each process calls it with its rank. Processes meet at a
file, so no port is ever chosen, and every wait has a deadline.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tinsmith_engine.distributed.process_group import Ranks, end_process

DEADLINE_S = 90.0
MODULE = "tests.unit.engine.distributed.group"


@dataclass
class Finished:
    """How the processes of a group ended."""

    exit_codes: list[int]
    logs: list[str]


class Group:
    """Processes that run a scenario."""

    def __init__(
        self, scenario: str, folder: Path, *, world_size: int = 2, timeout_s: float = 60.0
    ) -> None:
        self._folder = folder
        meeting = Path(tempfile.mkdtemp(dir=folder)) / "store"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self._logs = [folder / f"{scenario}-{rank}.log" for rank in range(world_size)]
        for rank in range(world_size):
            arguments = [scenario, folder, meeting, rank, world_size, timeout_s]
            command = [sys.executable, "-m", MODULE, *map(str, arguments)]
            with self._logs[rank].open("wb") as log:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                )

    def finish(self) -> Finished:
        """Wait for all processes; what does not end in time is killed."""
        try:
            codes = [process.wait(DEADLINE_S) for process in self.processes]
        finally:
            self.kill()
        return Finished(codes, [log.read_text() for log in self._logs])

    def kill(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def run_group(scenario: str, folder: Path, *, world_size: int = 2) -> None:
    """Run a scenario, which must succeed on all ranks."""
    finished = Group(scenario, folder, world_size=world_size).finish()
    assert finished.exit_codes == [0] * world_size, "\n".join(finished.logs)


def main() -> None:
    """Run the scenario that the command line names, as one rank."""
    scenario, folder, meeting, rank, world_size, timeout_s = sys.argv[1:]
    torch.set_num_threads(1)
    faulthandler.enable()
    ranks = Ranks.start(
        store=Path(meeting),
        rank=int(rank),
        world_size=int(world_size),
        timeout_s=float(timeout_s),
    )
    scenarios = importlib.import_module("tests.unit.engine.distributed.scenarios")
    getattr(scenarios, scenario)(ranks, Path(folder))
    ranks.close()
    end_process(0)


if __name__ == "__main__":
    main()
