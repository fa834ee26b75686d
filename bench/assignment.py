"""Assignment of nodes: what a pass of the controller costs, and how well it does.

`python -m bench.assignment` times passes of `decide` for 200 jobs on 50 nodes and 1,000 jobs on
5,000, of 8 GPUs each: a cold one, in which no job holds a node, and a steady one, in which
nothing changes. Then it lets simulated days pass on 50 nodes: three projects with weights 1:1:2
that all have work waiting, and 200 jobs with two priorities while nodes fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import random
import time
from collections.abc import Sequence

from tests.unit.controller.simulation import (
    GPUS_OF_NODE,
    START,
    Failure,
    Log,
    Simulation,
    backlogged_jobs,
    mixed_jobs,
    simulated_nodes,
)

from bench import report
from bench.machine_load import NoiseMeter
from tinsmith_controller.assignment.decide import apply, decide
from tinsmith_controller.assignment.types import PodRequest, QueueConfig, Share, Stage, Workload
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.quantities import Resources

NUM_NODES = 50
WEIGHTS = {"red": 1.0, "green": 1.0, "blue": 2.0}
POLICY = QueueConfig(projects={name: Share(weight=weight) for name, weight in WEIGHTS.items()})
SIZES = ((1,), (2,), (8,), (8,) * 2, (8,) * 4, (8,) * 8, (8,) * 16, (8,) * 32)
Row = report.Row


def waiting_jobs(count: int, seed: int) -> list[Workload]:
    """Return jobs of 1 to 256 GPUs of three projects and priorities, all overdue."""
    chance = random.Random(seed)
    workloads = []
    for i in range(count):
        queued = START - datetime.timedelta(seconds=chance.uniform(600, 9000))
        project = chance.choice(sorted(WEIGHTS))
        pods = tuple(
            PodRequest("trainer", index, Resources(gpus * 8000, gpus * 2**36, gpus, 1))
            for index, gpus in enumerate(chance.choice(SIZES))
        )
        workloads.append(
            Workload(
                NamespacedName("TrainingJob", project, f"job-{i:05}"),
                project,
                "default",
                chance.choice([0, 0, 0, 10]),
                queued,
                queued,
                Stage.WAITING,
                pods,
            )
        )
    return workloads


def max_pass_tokens(num_jobs: int, num_nodes: int, repeats: int) -> list[Row]:
    """Time a cold and a steady pass."""
    nodes = simulated_nodes(num_nodes)
    cold_ms, steady_ms, left = [], [], []
    for seed in range(repeats):
        workloads = waiting_jobs(num_jobs, seed)
        begin_s = time.perf_counter()
        decisions = decide(workloads, nodes, POLICY, START)
        cold_ms.append((time.perf_counter() - begin_s) * 1e3)
        workloads = apply(workloads, decisions, START)
        left.append(float(len(decisions.waiting)))
        begin_s = time.perf_counter()
        again = decide(workloads, nodes, POLICY, START)
        steady_ms.append((time.perf_counter() - begin_s) * 1e3)
        if again != dataclasses.replace(decisions, assign={}, preempt={}):
            raise RuntimeError(f"a second pass over {num_jobs} jobs changed something")
    what = f"{num_jobs} jobs on {num_nodes} nodes"
    return [
        Row.of(f"{what}: cold pass", cold_ms, "ms", "lower", target=3000.0),
        Row.of(f"{what}: steady pass", steady_ms, "ms", "lower", target=500.0),
        Row.of(f"{what}: jobs that wait after it", left, "jobs", "lower"),
    ]


def preemption_rows(repeats: int) -> list[Row]:
    """Time the pass in which 40 urgent jobs meet 5,000 nodes full of others."""
    nodes = simulated_nodes(5000)
    duration_ms, num_victims = [], []
    for seed in range(repeats):
        then = START - datetime.timedelta(seconds=3600)
        others = [dataclasses.replace(job, priority=0) for job in waiting_jobs(1500, seed)]
        others = apply(others, decide(others, nodes, POLICY, then), then)
        urgent = [
            dataclasses.replace(
                job,
                key=dataclasses.replace(job.key, name=f"urgent-{i}"),
                priority=10,
                pods=tuple(
                    PodRequest("trainer", index, Resources(64_000, 2**39, GPUS_OF_NODE, 1))
                    for index in range(16)
                ),
            )
            for i, job in enumerate(waiting_jobs(40, seed))
        ]
        begin_s = time.perf_counter()
        decisions = decide([*others, *urgent], nodes, POLICY, START)
        duration_ms.append((time.perf_counter() - begin_s) * 1e3)
        num_victims.append(float(len(decisions.preempt)))
    what = "40 urgent jobs of 128 GPUs on 5000 full nodes"
    return [
        Row.of(f"{what}: pass", duration_ms, "ms", "lower", target=5000.0),
        Row.of(f"{what}: jobs that give way", num_victims, "jobs", "lower"),
    ]


def fairness_rows(repeats: int) -> list[Row]:
    """Let three projects wait all the time, and compare their GPU time with their weights."""
    deviation, used = [], []
    for seed in range(repeats):
        jobs = backlogged_jobs(150, seed, max_nodes=4)
        simulation = Simulation(jobs, simulated_nodes(NUM_NODES), POLICY)
        while simulation.log.now_s < 1 or min(simulation.waiting[name] for name in WEIGHTS) > 0:
            simulation.step()
        deviation.append(100 * _deviation(simulation.log))
        used.append(100 * simulation.log.utilisation(NUM_NODES * GPUS_OF_NODE))
    what = "3 projects that always wait, jobs of 1 to 32 GPUs"
    return [
        Row.of(f"{what}: farthest from its weight", deviation, "%", "lower", target=10.0),
        Row.of(f"{what}: GPU time used", used, "%", "higher", target=90.0),
    ]


def failure_rows(repeats: int) -> list[Row]:
    """Let 200 jobs with two priorities pass while a node fails every ten minutes."""
    logs = []
    for seed in range(repeats):
        chance = random.Random(seed)
        nodes = simulated_nodes(NUM_NODES)
        failures = [
            Failure(chance.choice(nodes).name, 600.0 * i, chance.uniform(60, 590))
            for i in range(1, 20)
        ]
        jobs = mixed_jobs(200, seed, arrivals_s=3600)
        logs.append(Simulation(jobs, nodes, POLICY, failures).run(max_passes=5000))
    what = "200 jobs, nodes fail"

    def row(name: str, values: Sequence[float], unit: str) -> Row:
        return Row.of(f"{what}: {name}", values, unit, "lower")

    return [
        row("until the last has ended", [log.now_s for log in logs], "s simulated"),
        row("preemptions", [float(log.num_preemptions) for log in logs], "jobs"),
        row("pods replaced", [float(log.num_replacements) for log in logs], "jobs"),
        Row(
            name=f"{what}: GPUs held twice, jobs with only some of their pods",
            value=0.0,  # the simulation stops at the first
            unit="cases",
            better="lower",
            target=0.0,
        ),
    ]


def _deviation(log: Log) -> float:
    whole = sum(log.gpu_seconds.values())
    parts = {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}
    return max(abs(log.gpu_seconds[name] / whole / part - 1) for name, part in parts.items())


def main() -> None:
    """Run the benchmark and write `bench/results/assignment.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--days", type=int, default=3, help="simulated days of each kind")
    arguments = parser.parse_args()
    noise = NoiseMeter(lambda: sum(os.times()[:2]))
    rows = [
        *max_pass_tokens(200, 50, arguments.repeats),
        *max_pass_tokens(1000, 5000, arguments.repeats),
        *preemption_rows(arguments.repeats),
        *fairness_rows(arguments.days),
        *failure_rows(arguments.days),
    ]
    machine = {**report.machine(), "threads": 1, **noise.describe()}
    report.show("Assignment of nodes", rows, machine)
    report.write("assignment", rows, machine)


if __name__ == "__main__":
    main()
