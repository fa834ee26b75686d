"""The controller with 200 jobs on 50 nodes: time to decide, jobs/s, requests of each job.

`python -m bench.controller` starts a control plane of Kubernetes (API server, etcd, scheduler and
collectors) and the controller and scheduler of Tinsmith as processes. The 50 nodes have 8 GPUs each
and run their pods at once; drivers end after 0.5 to 2 seconds. So nothing is measured but deciding
and bookkeeping; all of it shares the cores of this machine. Every state of every pod is checked.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.cluster import prepare, start_cluster
from tests.e2e.crowd import GPUS_PER_NODE, WEIGHTS, JobCrowdOutcome, run_crowd
from tests.e2e.deployment import install_resources

from bench import report

_TIMEOUT_S = 900.0


def rows(outcomes: Sequence[JobCrowdOutcome], num_jobs: int, num_nodes: int) -> list[report.Row]:
    """Return the figures of several rounds."""
    what = f"{num_jobs} jobs of 1 to 64 GPUs, {num_nodes} nodes of {GPUS_PER_NODE}"
    row = report.Row.of
    return [
        row(
            f"{what}: jobs/s, from the first to the last",
            [each.num_jobs / each.duration_s for each in outcomes],
            "jobs/s",
            "higher",
        ),
        row(
            f"{what}: one decision about all of them, mean",
            [each.decision_s * 1e3 for each in outcomes],
            "ms",
            "lower",
            target=100.0,
        ),
        row(
            f"{what}: decisions",
            [each.num_decisions for each in outcomes],
            "decisions",
            "lower",
        ),
        row(
            f"{what}: API writes of each job",
            [each.num_writes / each.num_jobs for each in outcomes],
            "requests",
            "lower",
        ),
        row(
            f"{what}: preemptions",
            [each.num_preemptions for each in outcomes],
            "jobs",
            "lower",
        ),
        *(
            row(
                f"{what}: GPU-seconds of {name}, of what its weight is due, while all wait",
                [_part(each, name) for each in outcomes],
                "ratio",
                "higher",
            )
            for name in WEIGHTS
        ),
        row(
            f"{what}: full nodes exceeded, torn gangs, pods that were there twice",
            [len(each.history.violations()) for each in outcomes],
            "states",
            "lower",
            target=0.0,
        ),
    ]


def _part(outcome: JobCrowdOutcome, name: str) -> float:
    due = WEIGHTS[name] / sum(WEIGHTS.values())
    return outcome.gpu_seconds[name] / sum(outcome.gpu_seconds.values()) / due


def main() -> None:
    """Run the benchmark and write `bench/results/controller.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    prepare()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, start_cluster(Path(folder)) as cluster:
        install_resources(cluster)
        for seed in range(arguments.repeats):
            outcomes.append(
                run_crowd(
                    cluster,
                    cluster.new_folder("crowd"),
                    num_jobs=arguments.jobs,
                    num_nodes=arguments.nodes,
                    seed=seed,
                    timeout_s=_TIMEOUT_S,
                )
            )
        major, minor = cluster.version
    found = rows(outcomes, arguments.jobs, arguments.nodes)
    machine = {**report.machine(), "kubernetes": f"{major}.{minor}, on the same cores"}
    report.show("Controller", found, machine)
    report.write("controller", found, machine)


if __name__ == "__main__":
    main()
