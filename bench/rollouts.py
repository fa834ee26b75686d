"""Rollouts and environments at scale: episodes, faults, live sessions, a client that is killed.

`python -m bench.rollouts` starts scheduler, trainer, sampler, environment, coordinator and gateway
as processes. A tiny model plays the guessing game:

- with 1 to 1,000 instances at once, played by the client and by the coordinator;
- with groups of eight that are over-sampled by a quarter, and without;
- in an environment of which 1 % of the plays hang, crash or lie, beside a healthy one.

Then 1,024 sessions of the game live at once, stepped as fast as it goes, and at a fixed rate. The
steps hold no model: they measure the environment service and its streams. At the end a client with
100 instances and a batch on the server is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.support.pods import PodDeployment

import tinsmith
from bench import report
from bench.machine_load import process_cpu_s
from tinsmith.environments.environment_calls import EnvironmentInstance
from tinsmith.rollouts.batch_codec import EnvironmentTask
from tinsmith.rollouts.group_plan import GroupConfig
from tinsmith.rollouts.groups import GroupReport
from tinsmith.rollouts.machine import RolloutConfig
from tinsmith.types import SamplingParams
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model

_MODEL = "bench"
_NUM_SESSIONS = 1024
_NUM_LEFT = 100
_STEP_TIMEOUT_S = 2.0
_CLIENT_GRACE_S = 2.0
_LEFT_TIMEOUT_S = 60.0
_TARGET_STEPS = 3000.0
_EPISODE = RolloutConfig(max_turns=4, max_tokens_per_turn=8)
_PODS = ("scheduler", "trainer", "sampler", "gateway", "environment", "coordinator")
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "environment": {
        "environments": "faulty=bench.faulty_environment:FaultyGuessing",
        "max_instances": 2048,
        "max_project_instances": 2048,
        "max_project_workers": 32,
        "step_timeout_s": _STEP_TIMEOUT_S,
        "client_grace_s": _CLIENT_GRACE_S,
    },
    "coordinator": {
        "max_playing_episodes": 1000,
        "max_playing_episodes_of_project": 1000,
    },
}


@dataclass(frozen=True, slots=True)
class Played:
    """One batch of episodes.

    Attributes:
        episodes_per_s: Complete episodes, by the time of the batch.
        sampler_share: Processor time of the sampler, of that time.
        report: What became of the episodes.
        num_zero: Episodes that failed and were taken all the same.
    """

    episodes_per_s: float
    sampler_share: float
    report: GroupReport
    num_zero: int


class Player:
    """Plays batches against running pods."""

    def __init__(self, client: tinsmith.Client, pods: PodDeployment) -> None:
        self._client = client
        self._pods = pods
        self._sampler = client.create_sampler(base_model=_MODEL)
        self._num_batches = 0

    def play(
        self,
        num_groups: int,
        groups: GroupConfig,
        *,
        on_server: bool,
        environment: str = "guessing",
        fault_share: float | None = None,
    ) -> Played:
        """Play groups of an environment, and return how it went."""
        self._num_batches += 1
        config = {} if fault_share is None else {"fault_share": fault_share}
        sampler = self._pods.processes["sampler"].pid
        cpu_s, begin_s = process_cpu_s(sampler), time.monotonic()
        result = self._client.environments.play(
            environment,
            sampler=self._sampler,
            seeds=[EnvironmentTask(seed, config) for seed in range(num_groups)],
            config=_EPISODE,
            params=SamplingParams(temperature=1.0, seed=self._num_batches),
            groups=groups,
            batch_key=f"batch-{self._num_batches}",
            rollouts="server" if on_server else "client",
        )
        took_s = time.monotonic() - begin_s
        plays = [each for group in result.groups for each in group.trajectories]
        return Played(
            len(plays) / took_s,
            (process_cpu_s(sampler) - cpu_s) / took_s,
            result.report,
            sum(play.reason.is_infrastructure for play in plays),
        )


def crowd_rows(player: Player, crowds: Sequence[int], num_episodes: int) -> list[report.Row]:
    """Return episodes/s and the sampler's share by how many instances play at once."""
    rows = []
    for crowd in crowds:
        for on_server in (False, True):
            size = min(num_episodes, 64 * crowd)
            groups = GroupConfig(group_size=1, min_group_size=1, max_concurrency=crowd)
            played = player.play(size, groups, on_server=on_server)
            where = "on the server" if on_server else "in the client"
            what = f"{crowd} instances, {where}"
            rows += [
                report.Row.of(f"{what}: episodes", [played.episodes_per_s], "1/s", "higher"),
                report.Row.of(f"{what}: sampler busy", [played.sampler_share], "cores", "higher"),
            ]
            print(f"{what}: {played.episodes_per_s:.1f}/s", flush=True)
    return rows


def over_sampling_rows(player: Player, num_episodes: int) -> list[report.Row]:
    """Return what beginning more episodes than a group needs costs where none is slow."""
    rows = []
    for factor in (1.0, 1.25):
        groups = GroupConfig(group_size=8, max_concurrency=64, over_sampling_factor=factor)
        played = player.play(num_episodes // 8, groups, on_server=True)
        what = f"groups of 8, over-sampled by {factor:g}"
        cancelled = float(played.report.num_cancelled)
        rows += [
            report.Row.of(f"{what}: episodes taken", [played.episodes_per_s], "1/s", "higher"),
            report.Row.of(f"{what}: episodes given up", [cancelled], "episodes", "lower"),
        ]
        print(f"{what}: {played.episodes_per_s:.1f}/s", flush=True)
    return rows


def fault_rows(player: Player, num_episodes: int, repeats: int) -> list[report.Row]:
    """Return the episodes/s beside faults, as part of those without, in turns."""
    groups = GroupConfig(group_size=8, max_concurrency=64, max_replacements=4)
    shares, failures, num_zero = [], 0, 0
    for _ in range(repeats):
        healthy, faulty = (
            player.play(
                num_episodes // 8,
                groups,
                on_server=True,
                environment="faulty",
                fault_share=share,
            )
            for share in (0.0, 0.01)
        )
        shares.append(faulty.episodes_per_s / healthy.episodes_per_s)
        failures += sum(faulty.report.failures.values())
        num_zero += faulty.num_zero
        print(f"faults: {shares[-1]:.3f} of healthy; {dict(faulty.report.failures)}", flush=True)
    what = f"1 % of plays hang ({_STEP_TIMEOUT_S:g} s), crash or lie"
    return [
        report.Row.of(f"{what}: episodes/s, of healthy", shares, "ratio", "higher", target=0.97),
        report.Row.of(f"{what}: plays that failed", [float(failures)], "plays", "lower"),
        report.Row.of(f"{what}: scored as zero", [float(num_zero)], "plays", "lower", target=0.0),
    ]


async def session_rows(address: str, key: str, duration_s: float) -> list[report.Row]:
    """Return what 1,024 live sessions of a game can do."""
    async with tinsmith.Client(address, key) as client:
        begin_s = time.monotonic()
        instances = await asyncio.gather(
            *(
                client.environments.create_instance_async(
                    "guessing", seed=seed, config={"max_turns": 10_000, "high": 10**8}
                )
                for seed in range(_NUM_SESSIONS)
            )
        )
        start_s = time.monotonic() - begin_s
        print(f"{_NUM_SESSIONS} sessions in {start_s:.1f} s", flush=True)
        rate = await _as_fast_as_it_goes(instances, duration_s)
        print(f"closed loop: {rate:.0f} steps/s", flush=True)
        latencies_s = await _at_a_rate(instances, min(_TARGET_STEPS, 0.8 * rate), duration_s)
        print(f"open loop: {len(latencies_s) / duration_s:.0f} steps/s", flush=True)
        await asyncio.gather(*(each.delete_async() for each in instances))
    what = f"{_NUM_SESSIONS} live sessions"
    paced = f"{what}, {len(latencies_s) / duration_s:.0f} steps/s"
    row = report.Row.of
    return [
        row(f"{what}: all started", [start_s], "s", "lower"),
        row(f"{what}: steps", [rate], "1/s", "higher", target=_TARGET_STEPS),
        row(f"{paced}: p50", [float(np.percentile(latencies_s, 50)) * 1e3], "ms", "lower"),
        row(
            *(f"{paced}: p99", [float(np.percentile(latencies_s, 99)) * 1e3], "ms", "lower"),
            target=50.0,
        ),
    ]


async def _as_fast_as_it_goes(instances: Sequence[EnvironmentInstance], for_s: float) -> float:
    end_s = time.monotonic() + for_s

    async def play(instance: EnvironmentInstance) -> int:
        num_steps = 0
        while time.monotonic() < end_s:
            await instance.step("0")
            num_steps += 1
        return num_steps

    begin_s = time.monotonic()
    num_steps = sum(await asyncio.gather(*map(play, instances)))
    return num_steps / (time.monotonic() - begin_s)


async def _at_a_rate(
    instances: Sequence[EnvironmentInstance], rate: float, for_s: float
) -> list[float]:
    """Return the time of each step, from when it was due, at so many steps each second."""
    latencies_s: list[float] = []
    begin_s = time.monotonic() + 0.1

    async def step(instance: EnvironmentInstance, due_s: float) -> None:
        await instance.step("0")
        latencies_s.append(time.monotonic() - due_s)

    steps = []
    for index in range(int(rate * for_s)):
        due_s = begin_s + index / rate
        if (wait_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        steps.append(asyncio.create_task(step(instances[index % len(instances)], due_s)))
    await asyncio.gather(*steps)
    return latencies_s


_LEAVER = f"""
import asyncio, sys, tinsmith
async def main():
    async with tinsmith.Client(sys.argv[1], sys.argv[2]) as client:
        held = await asyncio.gather(*(
            client.environments.create_instance_async("guessing", seed=seed, job="left")
            for seed in range({_NUM_LEFT})
        ))
        print("holding", flush=True)
        await asyncio.sleep(3600)
        print(held)
asyncio.run(main())
"""


def leaver_rows(client: tinsmith.Client, address: str, key: str) -> list[report.Row]:
    """Return how long instances of a killed client stay, after the grace that it is given."""
    command = [sys.executable, "-c", _LEAVER, address, key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leaver:
        assert leaver.stdout is not None
        if leaver.stdout.readline().strip() != "holding":
            raise RuntimeError("the client that is to be killed did not start")
        os.kill(leaver.pid, signal.SIGKILL)
    begin_s = time.monotonic()
    num_left = _NUM_LEFT
    while num_left and time.monotonic() < begin_s + _LEFT_TIMEOUT_S:
        time.sleep(0.1)
        counted = sum(
            each.num_abandoned for each in client.environments.statistics() if each.job == "left"
        )
        num_left = _NUM_LEFT - counted
    what = f"client with {_NUM_LEFT} instances killed"
    took_s = time.monotonic() - begin_s
    return [
        report.Row.of(f"{what}: left", [float(num_left)], "instances", "lower", target=0.0),
        report.Row.of(f"{what}: all gone (grace {_CLIENT_GRACE_S:g} s)", [took_s], "s", "lower"),
    ]


def main() -> None:
    """Run the benchmark and write `bench/results/rollouts.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crowds", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--session-seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_tiny_model(folder / "model", TinyModelConfig())
        with PodDeployment(folder / "pods", {_MODEL: model}, _PODS, settings=_SETTINGS) as pods:
            with tinsmith.Client(pods.scheduler_address, pods.api_key) as client:
                player = Player(client, pods)
                rows = crowd_rows(player, arguments.crowds, arguments.episodes)
                rows += over_sampling_rows(player, arguments.episodes)
                rows += fault_rows(player, arguments.episodes, arguments.repeats)
                rows += leaver_rows(client, pods.scheduler_address, pods.api_key)
            rows += asyncio.run(
                session_rows(pods.scheduler_address, pods.api_key, arguments.session_seconds)
            )
    report.show("Rollouts", rows, report.machine())
    report.write("rollouts", rows, report.machine())


if __name__ == "__main__":
    main()
