"""`python -m tests.fuzz --count 50000`: hostile traffic against pods that run as processes.

The Tinker wire, every native method, every HTTP route and raw HTTP/2 frames are attacked beside
each other, while connections are left half open. A neighbour measures its own calls before and
meanwhile. Prints a table, and writes `bench/results/fuzz.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.report import Row, machine, show, write

from tests.fuzz.attack import attack
from tests.fuzz.frames import HalfOpen, send_frames
from tests.fuzz.native import Calls
from tests.fuzz.routes import Routes
from tests.fuzz.tally import Tally
from tests.integration.servers import BASE_MODEL, Deployment, create_key, pods
from tests.support.memory import peak_mib, resident_mib
from tests.support.pods import PodProcess
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model

_SHARES = {"wire": 0.2, "native": 0.4, "route": 0.25, "frames": 0.15}
_NUM_WORKERS = {"native": 4, "route": 2, "frames": 2}
_CALM_S = 10.0
_MAX_SLOWER_MS, _MAX_GROWTH_MIB = 100.0, 1024.0
_SAD = ("Traceback (most recent call last)", "failed by a bug")


class Neighbour:
    """A client in a process of its own, which measures."""

    def __init__(self, address: str, key: str) -> None:
        parent = "projects/neighbour"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.neighbour", address, key, parent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stop(self) -> dict[str, Any]:
        """Return what it measured."""
        written, _ = self._process.communicate("", timeout=60)
        measured: dict[str, Any] = json.loads(written)
        return measured


async def send_all(
    deployment: Deployment, keys: dict[str, str], count: int, connections: int, seed: int
) -> tuple[Tally, HalfOpen]:
    """Send all hostile traffic; return what came of it."""
    # What attackers compute is no part of what is measured.
    os.nice(10)
    tally = Tally()
    host, _, port = deployment.address.rpartition(":")
    url = f"http://{deployment.address}"
    counts = {sort: int(count * share) for sort, share in _SHARES.items()}
    half_open = HalfOpen(host, int(port), connections, random.Random(seed))
    calls = Calls(deployment.address, keys["attacker"], _names())
    routes = Routes(url, keys["attacker"])

    async def frames(chance: random.Random, number: int) -> None:
        while number > 0:
            number -= await send_frames(tally, host, int(port), keys["attacker"], number, chance)

    def repeated(
        send: Callable[[Tally, random.Random], Awaitable[None]],
    ) -> Callable[[random.Random, int], Awaitable[None]]:
        async def work(chance: random.Random, number: int) -> None:
            for _ in range(number):
                await send(tally, chance)

        return work

    works = {"native": repeated(calls.send), "route": repeated(routes.send), "frames": frames}
    async with asyncio.TaskGroup() as group:
        wire = group.create_task(
            attack(
                url,
                keys["wire"],
                keys["trainer"],
                BASE_MODEL,
                count=counts["wire"],
                seed=seed,
            )
        )
        for sort, work in works.items():
            for index in range(_NUM_WORKERS[sort]):
                chance = random.Random(f"{seed}/{sort}/{index}")
                group.create_task(_as_task(work(chance, counts[sort] // _NUM_WORKERS[sort])))
    tally.statuses += wire.result().statuses
    tally.failures += wire.result().failures
    await half_open.close()
    await calls.close()
    await routes.close()
    return tally, half_open


async def _as_task(work: Awaitable[None]) -> None:
    await work


def _names() -> list[str]:
    """Return names of resources: of the attacker's project, and of the neighbour's."""
    return [
        f"projects/{project}{path}"
        for project in ("attacker", "trainer", "default")
        for path in (
            *("", "/sessions/s", "/trainingRuns/r", "/trainingRuns/r/checkpoints/c"),
            *("/trainingRuns/r/operations/1", "/samplingSessions/s", "/trainingJobs/j"),
            *("/environments/guessing", "/instances/i", "/episodes/e", "/keys/k", "/operations/o"),
        )
    ] + ["tiny", "workers/trainer-0", "guessing", "lora"]


def run(deployment: Deployment, processes: dict[str, PodProcess], options: Any) -> list[Row]:
    """Attack, and return the figures; failures are printed."""
    keys = {
        project: create_key(deployment, project)
        for project in ("attacker", "wire", "trainer", "neighbour")
    }
    calm = Neighbour(deployment.address, keys["neighbour"])
    time.sleep(_CALM_S)
    before = calm.stop()
    memory = {pod: resident_mib(process.pid) for pod, process in processes.items()}
    begin_s = time.perf_counter()
    beside = Neighbour(deployment.address, keys["neighbour"])
    tally, half_open = asyncio.run(
        send_all(deployment, keys, options.count, options.connections, options.seed)
    )
    meanwhile = beside.stop()
    duration_s = time.perf_counter() - begin_s
    for failure in [*before["failures"], *meanwhile["failures"]]:
        tally.fail(f"the neighbour's call failed: {failure}")
    crashed = [pod for pod, process in processes.items() if process.poll() is not None]
    for pod, process in processes.items():
        text = process.log.read_text(errors="replace")
        for sad in _SAD:
            if sad in text:
                tally.fail(f"the log of the {pod} has {text[text.index(sad) :][:1500]}")
    growth = {
        pod: peak_mib(process.pid) - memory[pod]
        for pod, process in processes.items()
        if pod not in crashed
    }
    for (sort, status), number in sorted(tally.statuses.items()):
        print(f"{sort:40} {status:>20} {number:>8}")
    for failure in tally.failures:
        print(f"FAILED {failure}")
    if crashed:
        print(f"CRASHED {crashed}")
    return [
        Row(name="messages", value=sum(tally.statuses.values()), unit="", better="higher"),
        Row(name="duration", value=round(duration_s), unit="s", better="lower"),
        Row(name="half-open connections", value=options.connections, unit="", better="higher"),
        Row(name="begun anew", value=half_open.num_begun, unit="", better="lower"),
        Row(name="crashes", value=len(crashed), unit="", better="lower", target=0),
        Row(name="untyped errors", value=len(tally.failures), unit="", better="lower", target=0),
        *_latencies(before["times_s"], meanwhile["times_s"]),
        *(
            Row(
                name=f"peak memory of the {pod}, more",
                value=round(mib),
                unit="MiB",
                better="lower",
                target=_MAX_GROWTH_MIB,
            )
            for pod, mib in growth.items()
        ),
    ]


def _latencies(alone: dict[str, list[float]], beside: dict[str, list[float]]) -> list[Row]:
    rows = []
    for how, title in (("native", "natively"), ("over_http", "by HTTP")):
        for percent in (50, 99):
            calm_ms, beside_ms = (_at_ms(times[how], percent) for times in (alone, beside))
            name = f"neighbour {title}, p{percent}"
            rows += [
                Row(name=f"{name} alone", value=calm_ms, unit="ms", better="lower"),
                Row(name=f"{name} beside", value=beside_ms, unit="ms", better="lower"),
            ]
        slower_ms = round(beside_ms - calm_ms, 1)
        more = f"neighbour {title}, p99, more"
        rows.append(
            Row(name=more, value=slower_ms, unit="ms", better="lower", target=_MAX_SLOWER_MS)
        )
    return rows


def _at_ms(times_s: list[float], percent: int) -> float:
    return round(statistics.quantiles(times_s, n=100)[percent - 1] * 1000, 1)


def main() -> int:
    """Attack, print the figures, and return 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000, help="messages of all sorts")
    parser.add_argument("--connections", type=int, default=1000, help="that stay half open")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinsmith-fuzz-") as name:
        folder = Path(name)
        model_dir = build_tiny_model(
            folder / "model", TinyModelConfig(hidden_size=32, num_layers=1)
        )
        with pods(folder, model_dir, "gateway", "environment", "coordinator") as (
            deployment,
            processes,
        ):
            rows = run(deployment, processes, options)
    show(f"fuzz, seed {options.seed}", rows, machine())
    write("fuzz", rows, machine() | {"seed": options.seed})
    return 0 if all(row.is_met is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
