"""The validation curves of all scenarios, over several seeds: figure 5 of the OpenTinker paper.

`python -m bench.scenarios` starts a server with the models that scenarios name, made on the spot.
It runs `tinsmith run scenario name=... seed=...` for each scenario and seed, one after the other.
`docs/scenarios/` gets one JSONL file of each scenario and the figure; `bench/results` the gains.

A gain is the mean reward of validation tasks at the end, minus that at the end of the warm start.
Its lower bound is that of a 95 % interval: differences are paired by task and averaged over the
seeds, and the interval is of their mean over tasks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench import report
from bench.scenario_figure import draw_figure, policies_of
from tinsmith.recipes.experiment.run_log import METRICS, read_metrics
from tinsmith.recipes.policy_gradient import paired_lower_95
from tinsmith.recipes.reinforcement import BEFORE, WARM_START
from tinsmith.recipes.scenarios.table import SCENARIOS
from tinsmith_local.made_models import MADE_MODELS, make_model
from tinsmith_local.process import ServerProcess

DOCS = Path(__file__).parents[1] / "docs" / "scenarios"
AFTER = "after"
_SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Gain:
    """What training gave one policy of a scenario.

    Attributes:
        policy: Its name; empty where there is one.
        mean: Over tasks and seeds.
        lower_95: Lower end of its 95 % interval.
        by_seed: The mean of each seed.
    """

    policy: str
    mean: float
    lower_95: float
    by_seed: tuple[float, ...]


def run_command(name: str, seed: int, folder: Path, server: ServerProcess) -> dict[str, Any]:
    """Run a scenario by its command; return what its curve begins with: how long it took.

    Raises:
        RuntimeError: If the command fails; its output is in the message.
    """
    command = [
        *(str(Path(sys.executable).with_name("tinsmith")), "run", "scenario", f"name={name}"),
        *(f"seed={seed}", f"output_dir={folder}", "overwrite=true"),
    ]
    environment = {
        **os.environ,
        "TINSMITH_ADDRESS": server.address,
        "TINSMITH_API_KEY": server.api_key,
        "OMP_NUM_THREADS": "1",
    }
    before_s, begin_s = _cpu_seconds(server.pid), time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stdout}{done.stderr}")
    return {
        "minutes": round((time.monotonic() - begin_s) / 60, 2),
        "server_cpu_minutes": round((_cpu_seconds(server.pid) - before_s) / 60, 2),
    }


def read_curve(name: str, seed: int, folder: Path, cost: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a run's file: one of the run, then one of each step that says something.

    The first holds what each validation task earned, by policy, before, after the warm start and
    after the run.
    """
    scores = {
        part: json.loads((folder / f"{part}.json").read_text())
        for part in (BEFORE, WARM_START, AFTER)
    }
    rewards = {part: [each["rewards"] for each in found] for part, found in scores.items()}
    head = {"scenario": name, "seed": seed, **cost, "rewards": rewards}
    rows = read_metrics(folder / METRICS)
    return [head, *({"seed": seed, **_rounded(row)} for row in rows)]


def write_curves(name: str, curves: Sequence[Sequence[Mapping[str, Any]]]) -> Path:
    """Write the curves of a scenario, one run behind the other."""
    DOCS.mkdir(parents=True, exist_ok=True)
    path = DOCS / f"{name}.jsonl"
    lines = [json.dumps(row) for curve in curves for row in curve]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def load_curves(name: str) -> list[list[dict[str, Any]]]:
    """Return the curves of a scenario as they were written; none where there is no file."""
    path = DOCS / f"{name}.jsonl"
    curves: list[list[dict[str, Any]]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        row = json.loads(line)
        if "scenario" in row:
            curves.append([])
        curves[-1].append(row)
    return curves


def gains_of(curves: Sequence[Sequence[Mapping[str, Any]]]) -> list[Gain]:
    """Return the gain of each policy over all seeds."""
    return [_gain(policy, index, curves) for index, policy in enumerate(policies_of(curves))]


def _gain(policy: str, index: int, curves: Sequence[Sequence[Mapping[str, Any]]]) -> Gain:
    start_ST = np.array([curve[0]["rewards"][WARM_START][index] for curve in curves])
    end_ST = np.array([curve[0]["rewards"][AFTER][index] for curve in curves])
    start_T, end_T = start_ST.mean(axis=0), end_ST.mean(axis=0)
    by_seed = (end_ST - start_ST).mean(axis=1)
    return Gain(
        policy,
        float((end_T - start_T).mean()),
        paired_lower_95(start_T.tolist(), end_T.tolist()),
        tuple(float(value) for value in by_seed),
    )


def _rounded(row: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a step, but for its clock, few digits each."""
    return {
        key: value if isinstance(value, int) or not math.isfinite(value) else float(f"{value:.4g}")
        for key, value in row.items()
        if key != "time_s"
    }


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its children."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _rows(name: str, curves: Sequence[Sequence[Mapping[str, Any]]]) -> list[report.Row]:
    rows = []
    for gain in gains_of(curves):
        what = f"{name} {gain.policy}".strip()
        spread = (round(min(gain.by_seed), 4), round(max(gain.by_seed), 4))
        rows += [
            report.Row(
                name=f"{what}: gain of the validation reward, {len(curves)} seeds",
                value=round(gain.mean, 4),
                unit="reward",
                better="higher",
                spread=spread,
            ),
            report.Row(
                name=f"{what}: lower end of its 95 % interval",
                value=round(gain.lower_95, 4),
                unit="reward",
                better="higher",
                target=0.0,
            ),
        ]
    minutes = [curve[0]["minutes"] for curve in curves]
    rows.append(report.Row.of(f"{name}: one seed", minutes, "minutes", "lower"))
    return rows


def main() -> int:
    """Run what is asked for, and draw the figure of all that there is; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.scenarios", description=__doc__)
    parser.add_argument("--names", nargs="*", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(_SEEDS))
    parser.add_argument("--draw", action="store_true", help="only draw what was written before")
    arguments = parser.parse_args()
    if not arguments.draw:
        with tempfile.TemporaryDirectory(prefix="tinsmith-scenarios-") as folder:
            _run_all(arguments.names, arguments.seeds, Path(folder))
    found = {name: curves for name in SCENARIOS if (curves := load_curves(name))}
    draw_figure(DOCS / "curves.png", found)
    rows = [row for name, curves in found.items() for row in _rows(name, curves)]
    report.write("scenarios", rows, report.machine())
    report.show("scenarios", rows, report.machine())
    return 0


def _run_all(names: Sequence[str], seeds: Sequence[int], folder: Path) -> None:
    wanted = {str(SCENARIOS[name].settings["base_model"]) for name in names}
    models = {name: make_model(name, folder) for name in sorted(wanted & set(MADE_MODELS))}
    with ServerProcess(folder / "server", models) as server:
        for name in names:
            curves = []
            for seed in seeds:
                output = folder / f"{name}-{seed}"
                cost = run_command(name, seed, output, server)
                curves.append(read_curve(name, seed, output, cost))
                print(f"{name} seed {seed}: {cost['minutes']} minutes", flush=True)
            write_curves(name, curves)


if __name__ == "__main__":
    sys.exit(main())
