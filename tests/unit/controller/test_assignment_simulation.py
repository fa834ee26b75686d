"""Days of a cluster, one event after the other."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.unit.controller.simulation import (
    GPUS_OF_NODE,
    Failure,
    SimulatedJob,
    Simulation,
    backlogged_jobs,
    mixed_jobs,
    simulated_nodes,
)

from tinsmith_controller.assignment.types import QueueConfig, Share

NUM_NODES = 50
WEIGHTS = {"red": 1.0, "green": 1.0, "blue": 2.0}
POLICY = QueueConfig(
    projects={project: Share(weight=weight) for project, weight in WEIGHTS.items()},
    backfill_patience_s=600,
)


@pytest.mark.parametrize("seed", [0])
def test_all_jobs_end_whatever_happens(seed: int) -> None:
    """200 jobs with two priorities on 50 nodes, of which one fails every ten minutes."""
    chance = random.Random(seed)
    nodes = simulated_nodes(NUM_NODES)
    failures = [
        Failure(chance.choice(nodes).name, at_s=600.0 * i, repair_s=chance.uniform(60, 590))
        for i in range(1, 20)
    ]
    jobs = mixed_jobs(200, seed, arrivals_s=3600)

    log = Simulation(jobs, nodes, POLICY, failures).run(max_passes=5000)

    assert set(log.ended_s) == {job.name for job in jobs}
    assert log.num_preemptions > 0
    assert log.num_replacements > 0


@pytest.mark.parametrize(
    ("projects", "num_generations"),
    [
        pytest.param(["red"], 1, id="one-project"),
        # Overdue jobs of other projects go first while their project has less.
        pytest.param(["red", "green", "blue"], 2, id="three-projects"),
    ],
)
def test_large_job_amid_a_stream_of_small_ones_does_not_starve(
    projects: list[str], num_generations: int
) -> None:
    """The stream alone would keep every node busy for ever."""
    chance = random.Random(0)
    longest_s = 1200.0
    stream = [
        SimulatedJob(
            f"small-{i}",
            chance.choice(projects),
            (1,),
            arrival_s=i * 10.0,
            duration_s=chance.uniform(600, longest_s),
        )
        for i in range(400)
    ]
    large = SimulatedJob("large", "red", (8,) * 8, arrival_s=750.0, duration_s=600.0)
    simulation = Simulation([*stream, large], simulated_nodes(10), POLICY)

    while "large" not in simulation.log.started_s:
        assert simulation.step()
        waited_s = simulation.log.now_s - large.arrival_s
        assert waited_s <= POLICY.backfill_patience_s + num_generations * longest_s

    late = [name for name, at_s in simulation.log.started_s.items() if at_s > 1400]
    assert len(late) > 10, "others go on around the nodes that are kept"


def test_gpu_time_follows_the_weights_while_all_wait() -> None:
    jobs = backlogged_jobs(150, seed=0, max_nodes=4)
    simulation = Simulation(jobs, simulated_nodes(NUM_NODES), POLICY)

    while simulation.log.now_s < 1 or min(simulation.waiting[each] for each in WEIGHTS) > 0:
        assert simulation.step()

    log = simulation.log
    assert log.now_s > 3 * 1800
    whole = sum(log.gpu_seconds.values())
    for project, weight in WEIGHTS.items():
        share = log.gpu_seconds[project] / whole
        assert share == pytest.approx(weight / sum(WEIGHTS.values()), rel=0.1)
    assert log.utilisation(NUM_NODES * GPUS_OF_NODE) > 0.9


def test_the_simulation_is_the_same_each_time() -> None:
    def run() -> tuple[dict[str, float], Counter[str]]:
        jobs = mixed_jobs(40, 7, arrivals_s=600)
        log = Simulation(jobs, simulated_nodes(10), POLICY).run(max_passes=5000)
        return log.ended_s, Counter(log.gpu_seconds)

    assert run() == run()
