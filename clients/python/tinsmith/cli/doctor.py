"""`tinsmith doctor`: what is wrong here, and what to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated

import rich.console
import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.output import AsJson, show_json
from tinsmith.doctor.cluster import check_cluster
from tinsmith.doctor.findings import Finding, Level
from tinsmith.doctor.machine import check_machine
from tinsmith.doctor.server import check_server

_MARKS = {
    Level.GOOD: "[green]ok[/]  ",
    Level.NOTE: "[yellow]note[/]",
    Level.PROBLEM: "[red]bad[/] ",
}


def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="Look at a cluster, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at this machine, the server and, if asked to, the cluster; say what to do.

    Ends with code 1 if something will fail.
    """
    findings: list[Finding] = []
    console = rich.console.Console(highlight=False, soft_wrap=True)
    for finding in _check(with_cluster=cluster):
        findings.append(finding)
        if not as_json:
            _show(console, finding)
    if as_json:
        show_json(findings)
    num_problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if not as_json:
        console.print(f"{num_problems} problems" if num_problems else "nothing is wrong")
    if num_problems:
        raise typer.Exit(1)


def _check(*, with_cluster: bool) -> Iterator[Finding]:
    return itertools.chain(
        check_machine(),
        check_server(lambda: connect("tinsmith doctor")),
        check_cluster() if with_cluster else (),
    )


def _show(console: rich.console.Console, finding: Finding) -> None:
    console.print(f"{_MARKS[finding.level]} {finding.check}: ", end="")
    console.print(finding.text, markup=False)
    if finding.remedy:
        console.print(f"       {finding.remedy}", markup=False)
