"""What durability costs, and how long recovery takes: `python -m bench.durability`.

Embedded servers, killed with SIGKILL where a recovery is measured. Two servers that are
compared take turns. The last part is many clients at once: each has a run of its own, submits all
its operations before it waits for the first, and collects every result.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

import tinsmith
from bench import report
from bench.concurrent_clients import Crowd
from bench.paired_runs import RANK, build_model
from tinsmith_local.process import ServerProcess
from tinsmith_local.tiny_model import build_tiny_model

_REPLAYS = (8, 32, 128)
_BATCH = (64,) * 4
_SNAPSHOT_S = 2.0
_DEFAULT_SNAPSHOT_S = 30.0
_STEPS = 60
_REPEATS = 5
_ADAM = tinsmith.AdamParams(learning_rate=1e-4)
_console = Console(highlight=False, stderr=True)


def main() -> int:
    """Measure and write `bench/results/durability.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--futures", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinsmith-durability-") as name:
        folder = Path(name)
        model = folder / "model"
        build_model(model, with_tokenizer=True)
        rows = _recovery(folder, model)
        rows += _snapshots(folder, model)
        rows += _disk(folder, model)
        machine = report.machine() | {"threads": 1}
        report.write("durability", rows, machine)
        tiny = build_tiny_model(folder / "tiny")
        rows += _crowd(folder, tiny, arguments.clients, arguments.futures)
    report.write("durability", rows, machine)
    report.show("Durability", rows, machine)
    return 0


class Loop:
    """One client's run on a server, which is started for it."""

    def __init__(self, server: ServerProcess) -> None:
        server.start()
        self.client = tinsmith.Client(server.address, server.api_key, operation_timeout_s=600.0)
        self.run = self.client.create_lora_training_run("bench", rank=RANK, seed=1)
        random = np.random.default_rng(3)
        self._data = [_datum(random.integers(3, 4000, length + 1)) for length in _BATCH]

    def train(self, num_steps: int) -> float:
        """Take steps, two in flight; return the seconds."""
        begin_s = time.perf_counter()
        waiting: list[tinsmith.OperationFuture[tinsmith.OptimStepResponse]] = []
        for _ in range(num_steps):
            self.run.forward_backward(self._data, "cross_entropy")
            waiting.append(self.run.optim_step(_ADAM))
            if len(waiting) > 1:
                waiting.pop(0).result()
        for update in waiting:
            update.result()
        return time.perf_counter() - begin_s

    def minimal_step_ms(self, num_steps: int) -> float:
        """Return the median time of a step on one short sequence, each awaited."""
        data = [_datum(np.arange(5, 10))]
        seconds = []
        for _ in range(num_steps):
            begin_s = time.perf_counter()
            self.run.forward_backward(data, "cross_entropy")
            self.run.optim_step(_ADAM).result()
            seconds.append(time.perf_counter() - begin_s)
        return 1000 * statistics.median(seconds)


def _datum(tokens: np.ndarray) -> tinsmith.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1].tolist()), inputs)


def server_of(
    folder: Path,
    model: Path,
    further: Mapping[str, Mapping[str, float | str]] | None = None,
    **trainer: float,
) -> ServerProcess:
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder.parent / f"{folder.name}.toml"
    tables = {"trainer": trainer, **(further or {})}
    lines = [
        line
        for pod, values in tables.items()
        for line in (f"[{pod}]", *(f"{name} = {value}" for name, value in values.items()))
    ]
    settings.write_text("\n".join(lines) + "\n")
    return ServerProcess(folder / "server", {"bench": model}, flags=("--config", str(settings)))


def _recovery(folder: Path, model: Path) -> list[report.Row]:
    """How long a killed server takes to the first new result, by what it has to compute again."""
    rows = []
    for num_steps in _REPLAYS:
        place = folder / f"recovery-{num_steps}"
        server = server_of(place, model, snapshot_replay_s=1e9)
        loop = Loop(server)
        computed_s = loop.train(num_steps)
        server.kill()
        server.start()
        loop.client.close()
        begin_s = time.perf_counter()
        with tinsmith.Client(server.address, server.api_key) as client:
            client.runs.get(loop.run.name).optim_step(_ADAM).exception()
        recovery_s = time.perf_counter() - begin_s
        server.stop()
        _console.print(f"replay of {num_steps} steps: {recovery_s:.2f} s")
        rows += [
            _row(f"recovery, {num_steps} steps of 4x64 to compute again", recovery_s, "s"),
            _row(
                f"... / the time they took at first ({num_steps})", recovery_s / computed_s, "ratio"
            ),
        ]
    return rows


def _snapshots(folder: Path, model: Path) -> list[report.Row]:
    """Steps with a snapshot every two seconds of replay against steps without."""
    often = Loop(first := server_of(folder / "often", model, snapshot_replay_s=_SNAPSHOT_S))
    never = Loop(second := server_of(folder / "never", model, snapshot_replay_s=1e9))
    ratios = _take_turns(lambda: often.train(_STEPS), lambda: never.train(_STEPS))
    for loop, server in ((often, first), (never, second)):
        loop.client.close()
        server.stop()
    scaled = [1 + (ratio - 1) * _SNAPSHOT_S / _DEFAULT_SNAPSHOT_S for ratio in ratios]
    return [
        report.Row.of(
            f"steps with a snapshot every {_SNAPSHOT_S:g} s / without", ratios, "ratio", "lower"
        ),
        report.Row.of(
            f"... scaled to the default of {_DEFAULT_SNAPSHOT_S:g} s",
            scaled,
            "ratio",
            "lower",
            target=1.035,
        ),
    ]


def _disk(folder: Path, model: Path) -> list[report.Row]:
    """A minimal step with the ledger on disk against one with the ledger in memory."""
    memory = Path(tempfile.mkdtemp(prefix="tinsmith-durability-", dir="/dev/shm"))
    on_disk = Loop(first := server_of(folder / "disk", model))
    in_memory = Loop(second := server_of(memory / "memory", model))
    steps = 200
    on_disk.minimal_step_ms(50)
    in_memory.minimal_step_ms(50)
    pairs = [
        (on_disk.minimal_step_ms(steps), in_memory.minimal_step_ms(steps)) for _ in range(_REPEATS)
    ]
    for loop, server in ((on_disk, first), (in_memory, second)):
        loop.client.close()
        server.stop()
    return [
        report.Row.of("minimal step, ledger on disk", [disk for disk, _ in pairs], "ms", "lower"),
        report.Row.of(
            "... / ledger in memory", [disk / memory for disk, memory in pairs], "ratio", "lower"
        ),
    ]


def _crowd(folder: Path, model: Path, num_clients: int, num_futures: int) -> list[report.Row]:
    runs = num_clients + 8
    limits = {"scheduler": {"max_runs_per_project": runs}}
    with server_of(folder / "crowd", model, limits, max_runs=runs) as server:
        crowd = asyncio.run(
            Crowd(server.address, server.api_key, "bench").run(num_clients, num_futures)
        )
    name = f"{num_clients} clients x {num_futures} futures"
    latencies = sorted(crowd.latencies_s)
    wanted = num_clients * num_futures
    return [
        report.Row(
            name=f"{name}: lost",
            value=wanted - len(latencies),
            unit="count",
            better="lower",
            target=0,
        ),
        _row(f"{name}: futures each second", len(latencies) / crowd.duration_s, "1/s", "higher"),
        _row(f"{name}: p50 from submit to result", _quantile(latencies, 0.5), "s"),
        _row(f"{name}: p99 from submit to result", _quantile(latencies, 0.99), "s"),
        _row(f"{name}: p99 of the acknowledgement", _quantile(sorted(crowd.accepted_s), 0.99), "s"),
    ]


def _take_turns(first: Callable[[], float], second: Callable[[], float]) -> list[float]:
    first(), second()
    return [first() / second() for _ in range(_REPEATS)]


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


def _row(name: str, value: float, unit: str, better: report.Better = "lower") -> report.Row:
    return report.Row.of(name, [value], unit, better)


if __name__ == "__main__":
    raise SystemExit(main())
