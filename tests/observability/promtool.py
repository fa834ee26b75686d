"""Runs rules over series in promtool, and returns which alerts fired."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.observability.synthetic_runs import STEP_S, Series, Values

RULES = Path(__file__).parents[2] / "helm/tinsmith/alerts/tinsmith.rules.yaml"
_MISSING = "promtool is missing; on Debian and Ubuntu: apt-get install prometheus"
_GOT = re.compile(r"got:\s*(.*)")
_LABELS = re.compile(r"\{([^}]*)\} [0-9.E+]+")


@dataclass(frozen=True, slots=True)
class Fired:
    """An alert that fired, and its labels."""

    name: str
    labels: Mapping[str, str]


def fired_alerts(
    work: Path, series: Series, *, last_step: int, num_steps: int, step_s: int = STEP_S
) -> list[Fired]:
    """Return the alerts that fired in the steps up to one.

    promtool compares and does not answer, so it is asked with a wrong expectation, and what it says
    it got instead is read.

    Args:
        work: Where the file of the test goes.
        series: Values by step.
        last_step: The step whose end is looked at.
        num_steps: How many steps before it count.
        step_s: Time between two values.
    """
    tool = shutil.which("promtool")
    if tool is None:
        raise RuntimeError(_MISSING)
    firing = f'max_over_time(ALERTS{{alertstate="firing"}}[{num_steps * step_s}s])'
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": f"{step_s}s",
                "input_series": [
                    {"series": name, "values": _written(values)} for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": firing,
                        "eval_time": f"{last_step * step_s}s",
                        "exp_samples": [{"labels": '{alertname="wrong"}', "value": -1}],
                    }
                ],
            }
        ],
    }
    path = work / "rules-test.yaml"
    path.write_text(yaml.dump(test, Dumper=yaml.CSafeDumper, width=10_000_000))
    done = subprocess.run(
        [tool, "test", "rules", path], capture_output=True, text=True, check=False, timeout=110
    )
    said = done.stdout + done.stderr
    match = _GOT.search(said)
    if match is None or "FAILED" not in said:
        raise AssertionError(f"promtool did not compare: {said[-2000:]}")
    return [_parse(labels) for labels in _LABELS.findall(match[1])]


def _written(values: Values) -> str:
    return " ".join(f"{value:.6g}" if value == value else "_" for value in values)


def _parse(text: str) -> Fired:
    labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
    return Fired(labels.pop("alertname"), labels)
