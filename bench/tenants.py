"""Many tenants through the whole service, SDK to SDK, against PEFT one after another.

`python -m bench.tenants` starts the embedded server with compiled kernels. Each of 16 clients, a
thread of one process each, trains a run of its own and awaits every step. PEFT takes the same
steps tenant by tenant in this process while the server idles; the two take turns. A tenant of PEFT
waits for all others between its steps, so a round of PEFT is what a service step is compared with.
Then one client trains beside a growing number of runs that idle: what they cost should be nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

import tinsmith
from bench import report
from bench.machine_load import NoiseMeter, process_cpu_s
from bench.paired_runs import RANK, Batch, Case, PeftSide, build_model
from tinsmith_local.process import ServerProcess

_NUM_TENANTS = 16
_CASES = (
    (Case("16 clients x (4x64)", _NUM_TENANTS, (64,) * 4, {}), 6),
    (Case("16 clients x (1x32)", _NUM_TENANTS, (32,), {}), 20),
)
_IDLE = (0, 48, 192)
_IDLE_STEPS = 40
_ADAM = tinsmith.AdamParams(learning_rate=1e-4)
_console = Console(highlight=False, stderr=True)


class Tenant:
    """One client's run and its loop."""

    def __init__(self, client: tinsmith.Client, name: str) -> None:
        self._run = client.create_lora_training_run("bench", rank=RANK, seed=1, display_name=name)

    def train(self, batch: Batch, num_steps: int) -> list[float]:
        """Take steps, each awaited; return the seconds of each."""
        data = [_datum(row) for row in batch]
        seconds = []
        for _ in range(num_steps):
            begin_s = time.perf_counter()
            gradient = self._run.forward_backward(data, "cross_entropy")
            step = self._run.optim_step(_ADAM)
            gradient.result()
            step.result()
            seconds.append(time.perf_counter() - begin_s)
        return seconds


def _datum(row: list[int]) -> tinsmith.Datum:
    inputs = {"target_tokens": np.array(row[1:]), "weights": np.ones(len(row) - 1, np.float32)}
    return tinsmith.Datum(tinsmith.ModelInput.from_ints(row[:-1]), inputs)


def tenant_rows(
    tenants: Sequence[Tenant], peft: PeftSide, case: Case, num_steps: int, repeats: int
) -> list[report.Row]:
    """Return throughput and latency of all tenants together."""
    batches = case.batches()
    tokens = sum(len(row) - 1 for batch in batches for row in batch)
    speeds, latencies, ratios, latency_ratios = [], [], [], []
    with ThreadPoolExecutor(len(tenants)) as pool:

        def serve(steps: int) -> tuple[float, list[float]]:
            begin_s = time.perf_counter()
            loops = [
                pool.submit(tenant.train, batch, steps)
                for tenant, batch in zip(tenants, batches, strict=True)
            ]
            seconds = [each for loop in loops for each in loop.result()]
            return time.perf_counter() - begin_s, seconds

        serve(2)
        peft.step(batches)
        for _ in range(repeats):
            rounds = []
            for _ in range(max(num_steps // 4, 1)):
                begin_s = time.perf_counter()
                peft.step(batches)
                rounds.append(time.perf_counter() - begin_s)
            peft_s = statistics.mean(rounds)
            total_s, seconds = serve(num_steps)
            p95_s = float(np.percentile(seconds, 95))
            speeds.append(tokens * num_steps / total_s)
            latencies.append(p95_s * 1e3)
            ratios.append(speeds[-1] / (tokens / peft_s))
            latency_ratios.append(p95_s / float(np.percentile(rounds, 95)))
    row = report.Row.of
    return [
        row(f"{case.name}, service: tokens/s", speeds, "tokens/s", "higher"),
        row(f"{case.name}, service / sequential PEFT: tokens/s", ratios, "ratio", "higher"),
        row(f"{case.name}, service: p95 of a step", latencies, "ms", "lower"),
        row(
            f"{case.name}, p95 of a step / p95 of a round of PEFT",
            latency_ratios,
            "ratio",
            "lower",
        ),
    ]


def idle_rows(client: tinsmith.Client, active: Tenant, batch: Batch) -> list[report.Row]:
    """Return what runs that idle cost the one that trains."""
    rows = []
    first_ms = 0.0
    num_idle = 0
    for wanted in _IDLE:
        while num_idle < wanted:
            Tenant(client, f"idle-{num_idle}").train(batch, 1)
            num_idle += 1
        active.train(batch, 5)
        p50_ms = statistics.median(active.train(batch, _IDLE_STEPS)) * 1e3
        first_ms = first_ms or p50_ms
        rows.append(
            report.Row.of(
                f"one client x (1x32) beside {wanted} idle runs: p50 of a step / beside none",
                [p50_ms / first_ms],
                "ratio",
                "lower",
            )
        )
    return rows


def main() -> None:
    """Run the benchmark and write `bench/results/tenants.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as name:
        folder = Path(name)
        build_model(folder / "model", with_tokenizer=True)
        flags = ["--compiled", "--dtype", arguments.dtype]
        with (
            ServerProcess(folder / "server", {"bench": folder / "model"}, flags=flags) as server,
            tinsmith.Client(server.address, server.api_key) as client,
        ):
            tenants = [Tenant(client, f"tenant-{index}") for index in range(_NUM_TENANTS)]
            dtype = getattr(torch, arguments.dtype)
            peft = PeftSide(folder / "model", dtype, _NUM_TENANTS)
            meter = NoiseMeter(lambda: process_cpu_s(server.pid) + time.process_time())
            for case, num_steps in _CASES:
                rows += tenant_rows(tenants, peft, case, num_steps, arguments.repeats)
                _console.print(f"{case.name}: {rows[-3].value:.2f} of sequential PEFT")
            rows += idle_rows(client, tenants[0], _CASES[1][0].batches()[0])
            conditions = meter.describe()
    machine = report.machine() | {"threads": 1, "dtype": arguments.dtype} | conditions
    report.show("16 clients through the service against sequential PEFT", rows, machine)
    suffix = "" if arguments.dtype == "float32" else f"-{arguments.dtype}"
    report.write(f"tenants{suffix}", rows, machine)


if __name__ == "__main__":
    main()
