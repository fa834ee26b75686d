"""`make flakes RUNS=5 LOAD=3 TESTS="..."`: run tests often, under trouble, and name what fails.

Each run has another order of tests and another seed of hashes. Beside it, busy processes of equal
priority take the cores and one writes and syncs a file; every second run has a single core. A test
that fails in any run is named, with the seeds of its failures; so is one near its timeout.

The verdict of n green runs: at 95 %, a test fails by chance in fewer than 3/n of them.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.junit import read_cases

TIMEOUT_S = 300.0
"""What pyproject.toml gives a test."""
SLOW_S = TIMEOUT_S / 4
_MAX_RUN_S = 3600.0


@dataclass(slots=True)
class Findings:
    """What runs found, by test."""

    failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Where it failed: the run, its seed and what was beside it."""
    slowest_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, junit: Path, where: str) -> str:
        """Add a run's record; return a line about it."""
        try:
            cases = read_cases(junit)
        except (FileNotFoundError, ElementTree.ParseError):
            self.failures["(the run itself)"].append(where)
            return "no record: the run was broken off"
        for case in cases:
            self.slowest_s[case.node] = max(self.slowest_s[case.node], case.seconds)
            if case.outcome == "failed":
                self.failures[case.node].append(where)
        num_failed = sum(case.outcome == "failed" for case in cases)
        return f"{len(cases) - num_failed} passed or skipped, {num_failed} failed"


def say(line: str) -> None:
    """Print a line at once, also into a file."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the tests; return 1 if any failed in any run."""
    arguments = _parse_arguments()
    findings = Findings()
    with tempfile.TemporaryDirectory(prefix="tinsmith-flakes-") as folder:
        for number in range(arguments.runs):
            seed = arguments.seed + number
            is_pinned = number % 2 == 1
            where = f"seed {seed}" + (", one core" if is_pinned else "")
            junit = Path(folder) / f"{number}.xml"
            log = Path(folder) / f"{number}.log"
            begin_s = time.monotonic()
            with _trouble(arguments.load, Path(folder)):
                return_code = _run(arguments.tests, seed, is_pinned, junit, log)
            line = findings.add(junit, where)
            seconds = time.monotonic() - begin_s
            say(f"run {number + 1} of {arguments.runs}: {where}: {line}, {seconds:.0f} s")
            if return_code:
                say(log.read_text()[-20_000:])
    for node, places in sorted(findings.failures.items()):
        say(f"FAILED {len(places)} of {arguments.runs}: {node} ({'; '.join(places)})")
    for node, seconds in sorted(findings.slowest_s.items()):
        if seconds > SLOW_S:
            say(f"SLOW: {node} took {seconds:.0f} of {TIMEOUT_S:.0f} s")
    return 1 if findings.failures else 0


def _run(tests: Sequence[str], seed: int, is_pinned: bool, junit: Path, log: Path) -> int:
    """Run pytest once and return its exit code."""
    command = [sys.executable, "-m", "pytest", "-q", f"--order-seed={seed}", f"--junitxml={junit}"]
    command += ["-n", str(os.cpu_count() or 1), "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += list(tests) or ["-m", "gate"]
    if is_pinned and shutil.which("taskset"):
        command = ["taskset", "-c", "0", *command]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    with log.open("w") as stream:
        try:
            return subprocess.run(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=_MAX_RUN_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return 124


@contextlib.contextmanager
def _trouble(load: int, folder: Path) -> Iterator[None]:
    """Keep the machine busy for as long as the context is open."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_burn, daemon=True) for _ in range(load)]
    if load:
        processes.append(context.Process(target=_sync, args=(folder / "synced",), daemon=True))
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _burn() -> None:
    end_s = time.monotonic() + _MAX_RUN_S
    while time.monotonic() < end_s:
        sum(range(100_000))


def _sync(path: Path) -> None:
    end_s = time.monotonic() + _MAX_RUN_S
    with path.open("wb") as file:
        while time.monotonic() < end_s:
            file.seek(0)
            file.write(os.urandom(2**20))
            file.flush()
            os.fsync(file.fileno())


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make flakes", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--load", type=int, default=3, help="busy processes beside the tests")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("tests", nargs="*", help="arguments of pytest; the gate's tests if empty")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
