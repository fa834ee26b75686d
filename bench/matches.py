"""Barriers of a match under load: members that are slow, late, dead or doubled, kills between.

`python -m bench.matches` starts a scheduler and a coordinator as processes. Four members go through
10,000 phases, and the coordinator is killed and started 50 times meanwhile. What every member saw
is compared at the end: no barrier opened before all had arrived, none was passed out of order, and
nothing waited beyond the deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import numpy as np
from tests.support.pods import PodDeployment

from bench import report
from bench.episode_pods import COORDINATOR, episode_pods
from bench.match_crowd import Habits, MatchCrowd, MatchCrowdOutcome
from tinsmith.matches.types import POINTS

_PHASES_OF_EPOCH = 2
_DEADLINE_S = 120.0


class Killer:
    """Kills and starts the coordinator at evenly spread epochs."""

    def __init__(self, pods: PodDeployment, num_kills: int, num_epochs: int) -> None:
        self._pods = pods
        self._epochs = [int(num_epochs * (kill + 0.5) / num_kills) for kill in range(num_kills)]
        self._reached = asyncio.Event()
        self._epoch = 0
        self.num_kills = 0

    def note(self, epoch: int) -> None:
        """Note how far the match is."""
        if epoch % 250 == 0 and epoch != self._epoch:
            print(f"epoch {epoch}, {self.num_kills} kills", flush=True)
        self._epoch = epoch
        self._reached.set()

    async def run(self) -> None:
        """Kill at each of the epochs."""
        for epoch in self._epochs:
            while self._epoch < epoch:
                self._reached.clear()
                await self._reached.wait()
            await asyncio.to_thread(self._pods.restart, COORDINATOR)
            self.num_kills += 1


async def play(
    pods: PodDeployment,
    num_members: int,
    num_epochs: int,
    num_kills: int,
    habits: Habits,
    seed: int,
) -> tuple[MatchCrowdOutcome, int]:
    """Return what members saw, checked, and how often the coordinator was killed."""
    killer = Killer(pods, num_kills, num_epochs)
    crowd = MatchCrowd(
        pods.scheduler_address, pods.api_key, habits, seed=seed, progress=killer.note
    )
    killing = asyncio.create_task(killer.run())
    agents = tuple(f"agent-{number}" for number in range(num_members))
    try:
        outcome = await crowd.run(agents, num_epochs)
    finally:
        killing.cancel()
    outcome.check(agents, num_epochs * len(POINTS))
    return outcome, killer.num_kills


def rows(
    outcome: MatchCrowdOutcome, num_kills: int, num_phases: int, num_members: int
) -> list[report.Row]:
    """Return the figures of a run."""
    what = f"{num_members} members, {num_phases} phases"
    row = report.Row.of
    opening_s = outcome.opening_s()
    return [
        row(f"{what}: phases split or out of order", [0.0], "phases", "lower", target=0.0),
        row(f"{what}: kills of the coordinator", [float(num_kills)], "kills", "higher"),
        row(f"{what}: members that died", [float(outcome.num_deaths)], "members", "lower"),
        row(
            f"{what}: seats lost by members that lived",
            [float(outcome.num_leases_lost)],
            "seats",
            "lower",
        ),
        row(f"{what}: calls sent twice", [float(outcome.num_doubled)], "calls", "higher"),
        row(
            f"{what}: strangers refused",
            [float(outcome.num_strangers_refused)],
            "strangers",
            "higher",
        ),
        row(
            f"{what}: seats that strangers took once a lease had run out",
            [float(outcome.num_seats_taken)],
            "seats",
            "lower",
        ),
        row(
            f"{what}: from the last arrival until open for all, p50",
            [float(np.percentile(opening_s, 50)) * 1e3],
            "ms",
            "lower",
        ),
        row(f"{what}: the same, p99", [float(np.percentile(opening_s, 99)) * 1e3], "ms", "lower"),
        row(f"{what}: the same, longest", [max(opening_s)], "s", "lower", target=_DEADLINE_S),
        row(f"{what}: barriers/s", [len(opening_s) / outcome.duration_s], "barriers/s", "higher"),
    ]


def main() -> None:
    """Run the benchmark and write `bench/results/matches.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--phases", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    num_epochs = arguments.phases // _PHASES_OF_EPOCH
    with tempfile.TemporaryDirectory() as folder, episode_pods(Path(folder)) as pods:
        outcome, num_kills = asyncio.run(
            play(pods, arguments.members, num_epochs, arguments.kills, Habits(), arguments.seed)
        )
    found = rows(outcome, num_kills, arguments.phases, arguments.members)
    machine = {**report.machine(), "store": "SQLite, synchronous=FULL"}
    report.show("Matches", found, machine)
    report.write("matches", found, machine)


if __name__ == "__main__":
    main()
