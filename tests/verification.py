"""`make verify-all SUITES="..."`: every suite of the project to its end, and the record of it.

A suite that fails does not stop the others. What each one did is kept in
bench/results/verification.json, a row for each suite with the commit it ran on, and shown in
docs/verification.md. Suites that were not named keep the rows of their last run: their age is shown
and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Self

from bench import report

from tests.flakes import say
from tests.junit import Case, read_cases
from tests.tiers import MAX_QUARANTINED, read_tiers

ROOT = Path(__file__).parents[1]
RECORD = report.RESULTS_DIR / "verification.json"
PAGE = ROOT / "docs" / "verification.md"
_TERMINATE_S = 30.0
_HEADINGS = ["suite", "shows", "command", "commit", "date", "seconds", "passed", "failed"]
_HEADINGS += ["skipped", "missed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """One target of make, and what it shows."""

    name: str
    shows: str
    command: str
    timeout_s: float = 3600.0
    num_runs: int = 1
    """A test passes if it passes in most of them: the median of its scores decides."""
    is_counted: bool = True
    """Whether a failure makes the whole fail."""


SUITES = (
    Suite(name="gate", shows="what must never break", command="make gate"),
    Suite(name="processes", shows="kills, real processes", command="make test-processes"),
    Suite(name="heavy", shows="exactness at length", command="make test-heavy"),
    Suite(name="learning", shows="models learn", command="make test-learning", num_runs=3),
    Suite(
        name="quarantine",
        shows="tests that failed by chance",
        command="make test-quarantine",
        is_counted=False,
    ),
    Suite(name="postgres", shows="the oldest PostgreSQL", command="make test-postgres"),
    Suite(name="real", shows="real families at their widths", command="make test-real"),
    Suite(name="cluster", shows="a real API server", command="make test-cluster CI=true"),
    Suite(name="jobs", shows="jobs of every kind to their end", command="make test-jobs"),
    Suite(name="chaos", shows="kills, cuts, full disks", command="make chaos"),
    Suite(name="demo", shows="a model learns, 3 seeds", command='make demo-verdict SEEDS="0 1 2"'),
    Suite(name="site", shows="the documentation, links and anchors", command="make site"),
    Suite(name="guides", shows="commands of the documentation", command="make test-guides"),
    Suite(name="page", shows="the page in Chromium", command="make test-page"),
    Suite(name="alerts", shows="alert rules in promtool", command="make test-alerts"),
    Suite(name="observability", shows="panels on Prometheus", command="make test-observability"),
    Suite(name="thin-client", shows="the client installs alone", command="make thin-client"),
    Suite(name="clients", shows="clients of OpenAI's API, unmodified", command="make test-clients"),
    Suite(name="vllm", shows="sampling with a real vLLM", command="make test-vllm"),
    Suite(
        name="adapters",
        shows="environments of verifiers and OpenEnv",
        command="make test-adapters",
    ),
    Suite(name="attack", shows="nobody reaches what is another's", command="make attack"),
    Suite(name="fuzz", shows="hostile messages beside a neighbour", command="make fuzz"),
    Suite(
        name="node",
        shows="the chart and a training on a real kubelet",
        command="make test-node",
        # Its images and its tests have an hour each.
        timeout_s=7500.0,
    ),
    Suite(name="audit", shows="known vulnerabilities of what is locked", command="make audit"),
)


@dataclass(kw_only=True, slots=True)
class Row:
    """What a suite did when it last ran."""

    suite: str
    command: str
    commit: str
    date: str
    machine: str
    seconds: float = 0.0
    load: tuple[float, float] = (0.0, 0.0)
    """Before and after."""
    return_code: int = 0
    passed: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    """Each with its first line."""
    skipped: dict[str, int] = field(default_factory=dict)
    """By reason."""
    missed: list[str] = field(default_factory=list)
    """Figures short of their targets in what the suite wrote to bench/results."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Self:
        """Return the row that was written."""
        return cls(**{**entry, "load": tuple(entry["load"])})

    @property
    def has_passed(self) -> bool:
        """Whether everything that ran held; figures short of a target fail nothing."""
        return not self.failed


def main() -> int:
    """Run the suites; return 1 if one of them failed or the quarantine is overdue."""
    names = [suite.name for suite in SUITES]
    parser = argparse.ArgumentParser(prog="make verify-all", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(names))
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(names):
        parser.error(
            f"no suite is called {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    chosen = [suite for suite in SUITES if not arguments.suites or suite.name in arguments.suites]
    has_failed = False
    # Before the first suite: the record that it writes is a change, and none of what runs.
    commit = report.commit()
    for suite in chosen:
        say(f"== {suite.name}: {suite.command}")
        row = run(suite, commit)
        write_record({**read_record(), suite.name: row})
        verdict = "passed" if row.has_passed else "FAILED"
        say(f"== {suite.name}: {verdict}, {_counts(row)}, {row.seconds:.0f} s")
        for line in [*row.failures, *row.missed]:
            say(f"   {line}")
        has_failed |= suite.is_counted and not row.has_passed
    for problem in overdue(datetime.now(UTC).date()):
        say(f"== {problem}")
        has_failed = True
    return int(has_failed)


def run(suite: Suite, commit: str) -> Row:
    """Run a suite to its end, however often it wants to be run."""
    row = Row(
        suite=suite.name,
        command=suite.command,
        commit=commit,
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{os.cpu_count()} cores, {report.machine()['cpu']}",
        load=(round(os.getloadavg()[0], 1), 0.0),
    )
    begin_s, begin_wall_s = time.monotonic(), time.time()
    runs: list[list[Case]] = []
    with tempfile.TemporaryDirectory(prefix="tinsmith-verification-") as folder:
        for number in range(suite.num_runs):
            junit = Path(folder) / f"{number}.xml"
            row.return_code = _run_once(suite, junit) or row.return_code
            runs.append(read_cases(junit) if junit.is_file() else [])
    add_cases(row, runs)
    row.missed = _missed_since(begin_wall_s)
    row.seconds = round(time.monotonic() - begin_s)
    row.load = (row.load[0], round(os.getloadavg()[0], 1))
    return row


def add_cases(row: Row, runs: Sequence[Sequence[Case]]) -> None:
    """Count the tests of one run, or of several by what most of them say.

    A run that failed without a test that says so is a failure of its own.
    """
    failures = Counter(case.node for cases in runs for case in cases if case.outcome == "failed")
    reasons = {
        case.node: case.reason for cases in runs for case in cases if case.outcome == "failed"
    }
    nodes = {case.node: case for cases in runs for case in cases}
    lost = {node for node, count in failures.items() if 2 * count > len(runs)}
    row.failures = [f"{node}: {reasons[node]}"[:300] for node in sorted(lost)]
    skips = [case for case in nodes.values() if case.outcome == "skipped" and case.node not in lost]
    row.skipped = dict(sorted(Counter(case.reason for case in skips).items()))
    row.failed = len(lost)
    row.passed = len(nodes) - row.failed - len(skips)
    if row.return_code and not failures:
        row.failed += 1
        row.failures.append(f"{row.command} ended with {row.return_code}")
    elif not nodes:
        row.passed = 1


def overdue(today: date) -> list[str]:
    """Return what is wrong with the quarantine."""
    entries = read_tiers().quarantined
    problems = [
        f"quarantine: {entry.node} was to be understood by {entry.until}; {entry.owner} has it"
        for entry in entries
        if entry.until < today
    ]
    if len(entries) > MAX_QUARANTINED:
        problems.append(f"quarantine: {len(entries)} entries, at most {MAX_QUARANTINED}")
    return problems


def read_record() -> dict[str, Row]:
    """Return the rows of the last runs, by suite."""
    if not RECORD.is_file():
        return {}
    return {entry["suite"]: Row.of(entry) for entry in json.loads(RECORD.read_text())["rows"]}


def write_record(rows: Mapping[str, Row]) -> None:
    """Write the record, and the page that shows it."""
    ordered = [rows[suite.name] for suite in SUITES if suite.name in rows]
    RECORD.write_text(json.dumps({"rows": [asdict(row) for row in ordered]}, indent=1) + "\n")
    PAGE.write_text(page(rows))


def page(rows: Mapping[str, Row]) -> str:
    """Return docs/verification.md."""
    lines = [
        "# What was verified",
        "",
        "Written by `make verify-all`, which runs each suite to its end whatever fails.",
        "CI runs the gate alone; the others run when what they test has changed.",
        "Rows are of the commit and day that they name.",
        "",
        f"| {' | '.join(_HEADINGS)} |",
        "| --- " * len(_HEADINGS) + "|",
    ]
    for suite in SUITES:
        row = rows.get(suite.name)
        if row is None:
            cells = [suite.name, suite.shows, f"`{suite.command}`", "not run", *[""] * 6]
        else:
            cells = [suite.name, suite.shows, f"`{row.command}`", row.commit, row.date]
            cells += [f"{row.seconds:.0f}", str(row.passed), str(row.failed)]
            cells += [str(sum(row.skipped.values())), str(len(row.missed))]
        lines.append("| " + " | ".join(cells) + " |")
    for title, found in (
        ("Failed", {name: row.failures for name, row in rows.items()}),
        ("Skipped, with the reason", {name: _reasons(row) for name, row in rows.items()}),
        ("Short of target", {name: row.missed for name, row in rows.items()}),
    ):
        items = [
            f"- {suite.name}: {_plain(item)}"
            for suite in SUITES
            for item in found.get(suite.name, [])
        ]
        if items:
            lines += ["", f"## {title}", "", *items]
    machines = sorted({row.machine for row in rows.values()})
    lines += ["", f"Machines: {'; '.join(machines) or 'none yet'}."]
    return "\n".join(lines) + "\n"


def _run_once(suite: Suite, junit: Path) -> int:
    """Run the command; end it, with what it started, once its time is up."""
    environment = {**os.environ, "PYTEST_ADDOPTS": f"--junitxml={junit}"}
    process = subprocess.Popen(
        ["bash", "-c", suite.command], cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        return process.wait(suite.timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return 124
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise


def _missed_since(begin_wall_s: float) -> list[str]:
    """Return the figures short of their targets in the results that were written since."""
    missed = []
    for path in sorted(report.RESULTS_DIR.glob("*.json")):
        if path == RECORD or path.stat().st_mtime < begin_wall_s:
            continue
        for entry in json.loads(path.read_text()).get("rows", []):
            known = {name: entry.get(name) for name in ("value", "unit", "better", "target")}
            if None in known.values():
                continue
            if not report.Row(name=entry["name"], **known).is_met:
                figure = f"{known['value']:g} {known['unit']}, target {known['target']:g}"
                missed.append(f"{path.stem}: {entry['name']}: {figure}")
    return missed


def _counts(row: Row) -> str:
    return f"{row.passed} passed, {row.failed} failed, {sum(row.skipped.values())} skipped"


def _reasons(row: Row) -> list[str]:
    return [f"{count} x {reason}" for reason, count in row.skipped.items()]


def _plain(text: str) -> str:
    """Return text that a page shows as it is."""
    return "`" + re.sub(r"\s+", " ", text.replace("`", "'")) + "`"


if __name__ == "__main__":
    sys.exit(main())
