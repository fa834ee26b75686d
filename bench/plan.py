"""The estimates of `tinsmith plan` against what the engine then took: memory and time of a step.

`python -m bench.plan` makes models of real widths with a few layers. Each case is trained in a
process of its own, on one thread. Memory is the largest resident size of that process while it
trains. Steps are timed beside plans that are made in the same process, because `tinsmith plan`
measures the rate of a CPU. Both count CPU time, which other programs do not lengthen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from bench import report
from bench.machine_load import NoiseMeter, forget_peak_memory, peak_memory_bytes
from bench.paired_runs import datum
from tinsmith.planning.devices import measure_cpu
from tinsmith.planning.estimate import Workload, estimate
from tinsmith.planning.model_shape import ModelShape
from tinsmith_engine import AdamParams, Datum, Engine, LoraConfig
from tinsmith_engine.base.memory import keep_freed_memory
from tinsmith_local.random_model import build_random_model

_MEBIBYTE = 2**20
_MAX_MEMORY_ERROR = 0.15
_TIMEOUT_S = 600.0
_console = Console(highlight=False, stderr=True)


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A training that is planned, then done."""

    shape: str
    num_layers: int
    rank: int
    num_sequences: int
    sequence_tokens: int

    @property
    def name(self) -> str:
        """Shape, layers, rank, and sequences x tokens."""
        size = f"{self.num_sequences}x{self.sequence_tokens}"
        return f"{self.shape}, {self.num_layers} layers, rank {self.rank}, {size}"

    def workload(self) -> Workload:
        """Return it as the plan takes it."""
        return Workload(
            rank=self.rank,
            num_sequences=self.num_sequences,
            sequence_tokens=self.sequence_tokens,
        )


CASES = (
    PlanCase("smollm2-135m", 4, 8, 8, 64),
    PlanCase("smollm2-135m", 4, 32, 1, 512),
    PlanCase("qwen2.5-0.5b", 2, 32, 4, 64),
    PlanCase("qwen3-0.6b", 2, 8, 1, 512),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a case was planned to take, and took."""

    planned_bytes: int
    measured_bytes: int
    planned_s: Sequence[float]
    measured_s: Sequence[float]


def error_of(planned: float, measured: float) -> float:
    """Return the error of an estimate as a share of what was measured; above 0 if too high."""
    return planned / measured - 1.0


def case_rows(case: PlanCase, found: Found) -> list[report.Row]:
    """Return the figures of a case: size of both errors, and what they are made of."""
    memory = [size / _MEBIBYTE for size in (found.planned_bytes, found.measured_bytes)]
    times = list(zip(found.planned_s, found.measured_s, strict=True))
    row = report.Row.of
    return [
        row(
            f"{case.name}: error of the planned memory",
            [abs(error_of(*memory))],
            "share",
            "lower",
            target=_MAX_MEMORY_ERROR,
        ),
        row("... planned", [memory[0]], "MiB", "lower"),
        row("... measured", [memory[1]], "MiB", "lower"),
        row(
            f"{case.name}: error of the planned time",
            [abs(error_of(*pair)) for pair in times],
            "share",
            "lower",
        ),
        row("... planned", found.planned_s, "s", "lower"),
        row("... measured", found.measured_s, "s", "lower"),
    ]


def largest_rows(found: Sequence[Found]) -> list[report.Row]:
    """Return the largest error of all cases, in memory and in time."""
    memory = [abs(error_of(each.planned_bytes, each.measured_bytes)) for each in found]
    times = [
        abs(error_of(statistics.median(each.planned_s), statistics.median(each.measured_s)))
        for each in found
    ]
    return [
        report.Row.of(
            "largest error of the planned memory",
            [max(memory)],
            "share",
            "lower",
            target=_MAX_MEMORY_ERROR,
        ),
        report.Row.of("largest error of the planned time", [max(times)], "share", "lower"),
    ]


def train(case: PlanCase, model_dir: Path, repeats: int) -> Found:
    """Plan and train in this process, which has read no model before."""
    keep_freed_memory()
    torch.set_num_threads(1)
    shape, work = ModelShape.read(model_dir), case.workload()
    random = np.random.default_rng(1)
    vocabulary = (work.num_sequences, work.sequence_tokens + 1)
    batch = [datum(row) for row in random.integers(3, shape.vocab_size, vocabulary).tolist()]
    engine = _engine(model_dir, rank=case.rank)
    # The load has a peak of its own.
    forget_peak_memory()
    _step(engine, batch)
    measured_s = [_step(engine, batch) for _ in range(repeats)]
    measured_bytes = peak_memory_bytes()
    planned = [estimate(shape, work, measure_cpu(time.thread_time)) for _ in range(repeats)]
    return Found(
        planned_bytes=planned[0].trainer_bytes,
        measured_bytes=measured_bytes,
        planned_s=[each.step_s for each in planned],
        measured_s=measured_s,
    )


def _engine(model_dir: Path, *, rank: int) -> Engine:
    engine = Engine.load(model_dir, max_resident_runs=1, num_threads=1)
    engine.create_run("run", LoraConfig(rank=rank, seed=0))
    return engine


def _step(engine: Engine, batch: Sequence[Datum]) -> float:
    """Take a step; return its seconds on the CPU."""
    begin_s = time.thread_time()
    engine.forward_backward("run", batch, "cross_entropy", {})
    engine.optim_step("run", AdamParams())
    return time.thread_time() - begin_s


def main() -> int:
    """Run all cases and write `bench/results/plan.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--case", type=int, help="train one case here, and print it as JSON")
    parser.add_argument("--model", type=Path, help="directory of the model of that case")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.case is not None:
        one = train(CASES[arguments.case], arguments.model, arguments.repeats)
        sys.stdout.write(json.dumps([getattr(one, name) for name in Found.__slots__]) + "\n")
        return 0
    meter = NoiseMeter(_children_cpu_s)
    found, rows = [], []
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as name:
        for index, case in enumerate(CASES):
            folder = Path(name) / str(index)
            build_random_model(folder, case.shape, num_layers=case.num_layers)
            found.append(_in_a_process(index, folder, arguments.repeats))
            rows += case_rows(case, found[-1])
            _console.print(f"{case.name}: {found[-1]}")
    rows = largest_rows(found) + rows
    machine = report.machine() | {"torch": torch.__version__, "threads": 1} | meter.describe()
    report.show("tinsmith plan against what was measured", rows, machine)
    report.write("plan", rows, machine)
    return 0


def _in_a_process(index: int, model_dir: Path, repeats: int) -> Found:
    command = [sys.executable, "-m", "bench.plan", "--case", str(index)]
    answer = subprocess.run(
        [*command, "--repeats", str(repeats), "--model", str(model_dir)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_S,
    )
    return Found(*json.loads(answer.stdout.splitlines()[-1]))


def _children_cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    raise SystemExit(main())
