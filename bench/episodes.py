"""Many unreliable agents on one coordinator: what a claim costs, and that nothing is lost.

`python -m bench.episodes` starts a scheduler and a coordinator as processes, and 500 agents in
this one, each with a connection of its own. They play 2,000 episodes, two seconds each; of all
attempts 30 % are left by agents that die, 5 % are submitted after their lease ran out, 5 % twice.
Every round checks that each episode was counted once, with the reward that was acknowledged, and
none was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import numpy as np

from bench import report
from bench.episode_crowd import AgentCrowd, AgentCrowdOutcome, Habits
from bench.episode_pods import COORDINATOR, episode_pods


def rows(outcomes: list[AgentCrowdOutcome], num_agents: int, num_episodes: int) -> list[report.Row]:
    """Return the figures of several rounds."""
    what = f"{num_agents} agents, {num_episodes} episodes"
    row = report.Row.of

    def percentiles(q: float) -> list[float]:
        return [float(np.percentile(outcome.claim_s, q)) * 1e3 for outcome in outcomes]

    return [
        row(f"{what}: p50 of a claim", percentiles(50), "ms", "lower"),
        row(f"{what}: p99 of a claim", percentiles(99), "ms", "lower"),
        row(
            f"{what}: claims/s, until each was claimed once",
            [num_episodes / outcome.first_claims_s for outcome in outcomes],
            "claims/s",
            "higher",
        ),
        row(
            f"{what}: from the first claim to the last end",
            [outcome.duration_s for outcome in outcomes],
            "s",
            "lower",
        ),
        row(
            f"{what}: attempts that were left or fenced",
            [
                100 * (outcome.num_dead + outcome.num_fenced) / outcome.num_attempts
                for outcome in outcomes
            ],
            "%",
            "lower",
        ),
        row(f"{what}: episodes lost or counted twice", [0.0], "episodes", "lower", target=0.0),
    ]


def main() -> None:
    """Run the benchmark and write `bench/results/episodes.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=500)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    outcomes = []
    for seed in range(arguments.repeats):
        with (
            tempfile.TemporaryDirectory() as folder,
            episode_pods(Path(folder)) as pods,
        ):
            outcomes.append(
                asyncio.run(
                    _round(
                        pods.processes[COORDINATOR].address,
                        pods.api_key,
                        arguments.agents,
                        arguments.episodes,
                        seed,
                    )
                )
            )
    found = rows(outcomes, arguments.agents, arguments.episodes)
    machine = {**report.machine(), "store": "SQLite, synchronous=FULL"}
    report.show("Episodes", found, machine)
    report.write("episodes", found, machine)


async def _round(
    address: str, key: str, num_agents: int, num_episodes: int, seed: int
) -> AgentCrowdOutcome:
    crowd = AgentCrowd(address, key, Habits(lease_s=6.0, play_s=2.0), seed=seed)
    outcome = await crowd.run(num_agents, num_episodes)
    outcome.check(num_episodes)
    return outcome


if __name__ == "__main__":
    main()
