"""Peaks of memory of the engine; each is measured in a process that does nothing else.

`python -m bench.engine_memory parked MODEL` and `... head MODEL` print one JSON object.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from bench.paired_runs import RANK, Case, datum
from tinsmith_engine import AdamParams, BatchRequest, Engine, LoraConfig
from tinsmith_runtime.errors import TinsmithError

_MEBIBYTE = 2**20
_NUM_PARKED, _NUM_ACTIVE = 64, 16
_NUM_TOKENS = 1024


def main(arguments: list[str]) -> None:
    """Measure what the arguments name."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measure = {"parked": _parked, "head": _head}[arguments[0]]
    sys.stdout.write(json.dumps(measure(Path(arguments[1]))) + "\n")


def _parked(model_dir: Path) -> dict[str, float]:
    """64 runs that trained and were parked in host memory, then 16 that train together."""
    engine = Engine.load(model_dir, max_resident_runs=_NUM_ACTIVE, num_threads=1)
    batches = Case("", _NUM_ACTIVE, (64,) * 4, {}).batches()
    states = []

    def work() -> None:
        for index in range(_NUM_PARKED):
            engine.create_run("run", LoraConfig(rank=RANK, seed=index))
            _step(engine, ["run"], batches)
            states.append(engine.export_state("run"))
            engine.drop_run("run")
        runs = [f"run-{index}" for index in range(_NUM_ACTIVE)]
        for index, run in enumerate(runs):
            engine.create_run(run, LoraConfig(rank=RANK, seed=index))
        for _ in range(2):
            _step(engine, runs, batches)

    peak_bytes = _peak_bytes(work)
    numbers = states[0].tensors["theta"].numel()
    rows_bytes = 4 * numbers * (3 * _NUM_PARKED + 4 * _NUM_ACTIVE)
    return {"peak_mib": peak_bytes / _MEBIBYTE, "rows_mib": rows_bytes / _MEBIBYTE}


def _head(model_dir: Path) -> dict[str, float]:
    """One forward_backward over a large vocabulary."""
    engine = Engine.load(model_dir, max_resident_runs=1, num_threads=1, exact=False)
    engine.create_run("run", LoraConfig(rank=RANK, seed=0))
    batches = Case("", 1, (_NUM_TOKENS // 4,) * 4, {}).batches()
    peak_bytes = _peak_bytes(lambda: _step(engine, ["run"], batches))
    return {"peak_mib": peak_bytes / _MEBIBYTE, "num_tokens": float(_NUM_TOKENS)}


def _step(engine: Engine, runs: list[str], batches: list[list[list[int]]]) -> None:
    requests = [
        BatchRequest(
            run=run,
            batch=[datum(row) for row in batch],
            loss="cross_entropy",
            loss_config={},
            is_backward=True,
        )
        for run, batch in zip(runs, batches, strict=False)
    ]
    results = engine.compute(requests)
    results += engine.optim_steps([(run, AdamParams()) for run in runs])  # type: ignore[arg-type]
    for result in results:
        if isinstance(result, TinsmithError):
            raise result


def _peak_bytes(work: Callable[[], None]) -> int:
    """Return how far the memory of the process rose above what it was before."""
    process = psutil.Process()
    before = process.memory_info().rss
    peak = before
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        is_done.set()
        watcher.join()
    return int(peak - before)


if __name__ == "__main__":
    main(sys.argv[1:])
