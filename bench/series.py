"""How many series Prometheus keeps of runs that come one after another.

`python -m bench.series` starts one embedded server on the tiny model. Run after run is created,
takes a step, samples from its weights and reports a reward. The lines of `/metrics` are counted on
the way: a pod has series of the runs that were active last, so the count stops rising.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

import tinsmith
from bench import report
from bench.watchers import scrape
from tinsmith_local.process import ServerProcess, free_port
from tinsmith_local.tiny_model import build_tiny_model
from tinsmith_runtime.observability.run_series import MAX_RUNS

_MAX_ALIVE = 60
"""A project may have 256; what a run reported is recorded before it goes."""
_ADAM = tinsmith.AdamParams(learning_rate=1e-3)
_console = Console(highlight=False, stderr=True)


def lines_by_runs(folder: Path, num_runs: int) -> Iterator[tuple[int, int]]:
    """Yield how many runs there were, and the lines of metrics, each hundred runs."""
    model = build_tiny_model(folder / "model")
    metrics_address = f"127.0.0.1:{free_port()}"
    flags = ("--metrics-address", metrics_address, "--log-level", "WARNING")
    with (
        ServerProcess(folder / "server", {"bench": model}, flags=flags) as server,
        tinsmith.Client(server.address, server.api_key) as client,
    ):
        alive: collections.deque[tinsmith.TrainingRun] = collections.deque()
        for number in range(1, num_runs + 1):
            alive.append(_live_one(client))
            if len(alive) > _MAX_ALIVE:
                client.runs.delete(alive.popleft().name)
            if number % MAX_RUNS == 0:
                yield number, scrape(metrics_address)


def _live_one(client: tinsmith.Client) -> tinsmith.TrainingRun:
    run = client.create_lora_training_run("bench", rank=2)
    datum = tinsmith.Datum(
        tinsmith.ModelInput.from_ints([5, 6, 7]),
        {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
    )
    run.forward_backward([datum])
    run.optim_step(_ADAM).result()
    run.log_metrics({"reward": 0.5}, step=1)
    run.sampler().sample([5, 6], sampling_params=tinsmith.SamplingParams(max_tokens=2)).result()
    return run


def main() -> int:
    """Run the benchmark and write `bench/results/series.json`."""
    parser = argparse.ArgumentParser(prog="python -m bench.series", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    arguments = parser.parse_args()
    counts: dict[int, int] = {}
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as name:
        for number, lines in lines_by_runs(Path(name), arguments.runs):
            counts[number] = lines
            _console.print(f"{number:,} runs: {lines:,} lines")
    # Once pods have dropped runs, each new one takes the place of an old one.
    full, last = counts[2 * MAX_RUNS], counts[max(counts)]
    rows = [
        report.Row(name=f"lines after {2 * MAX_RUNS} runs", value=full, unit="", better="lower"),
        report.Row(name=f"lines after {max(counts):,} runs", value=last, unit="", better="lower"),
        report.Row(
            name="the last / the first of these",
            value=round(last / full, 3),
            unit="x",
            better="lower",
            target=1.05,
        ),
    ]
    machine = report.machine() | {"step": "tiny, rank 2, 1x3"}
    report.show("Series of metrics", rows, machine)
    report.write("series", rows, machine)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
