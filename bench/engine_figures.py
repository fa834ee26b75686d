"""Figures of the engine alone: what exactness costs, what tenants cost, the optimizer, memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.paired_runs import RANK, Batch, Case, EngineSide, compare, datum
from bench.report import Row
from tinsmith_engine import AdamParams, Engine, LoraConfig
from tinsmith_engine.arena.adam import SlotStep, adamw_
from tinsmith_engine.arena.adapter_targets import lora_layout
from tinsmith_engine.arena.slots import Arena

_MEBIBYTE = 2**20
_NUM_PARKED, _NUM_ACTIVE = 64, 16
_LARGE_VOCABULARY = 151_936


def exactness_rows(
    model_dir: Path, cases: Sequence[Case], dtype: str, device: str, *, compiled: bool, repeats: int
) -> list[Row]:
    """Return the time of the exact engine over that of the same engine without the promise."""
    rows = []
    for case in cases:
        batches = case.batches()
        exact, fast = (
            EngineSide(
                model_dir, dtype, case.num_tenants, device, exact=is_exact, compiled=compiled
            )
            for is_exact in (True, False)
        )
        ratios = compare(
            lambda: exact.step(batches),  # noqa: B023 - called before the next round
            lambda: fast.step(batches),  # noqa: B023
            repeats=repeats,
            device=device,
        )
        name = f"{case.name}, {dtype}: exact / fastest mode"
        rows.append(Row.of(name, ratios, "ratio", "lower", target=1.1))
    return rows


def sharing_row(model_dir: Path, dtype: str, device: str, *, compiled: bool, repeats: int) -> Row:
    """Return the speed of 16 tenants over that of one tenant with all of their tokens."""
    case = Case("16 tenants x (4x64)", 16, (64,) * 4, {})
    batches = case.batches()
    many = EngineSide(model_dir, dtype, 16, device, compiled=compiled)
    one = EngineSide(model_dir, dtype, 1, device, compiled=compiled)
    joined: list[Batch] = [[row for batch in batches for row in batch]]
    ratios = compare(
        lambda: one.step(joined), lambda: many.step(batches), repeats=repeats, device=device
    )
    name = f"16 tenants x (4x64) / one tenant x (64x64), {dtype}: tokens/s"
    return Row.of(name, ratios, "ratio", "higher", target=0.95)


def optimizer_row(model_dir: Path, device: str, *, repeats: int) -> Row:
    """Return the time of AdamW one parameter at a time over that of the row steps."""
    engine = Engine.load(model_dir, device=device, max_resident_runs=1, num_threads=1, exact=False)
    layout = lora_layout(engine.model.lora_targets, LoraConfig(rank=RANK, seed=0))
    place = torch.device(device)
    arena = Arena(layout, place)
    steps = [SlotStep(arena.take(), 1, AdamParams(), 1.0) for _ in range(16)]
    for step in steps:
        step.slot.grad_P.normal_()
    optimizers = []
    for _ in range(16):
        parameters = [
            torch.nn.Parameter(torch.zeros(entry.shape, device=place))
            for entry in layout.entries.values()
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizers.append(torch.optim.AdamW(parameters, foreach=False, fused=False))

    def one_by_one() -> None:
        for optimizer in optimizers:
            optimizer.step()

    ratios = compare(one_by_one, lambda: adamw_(steps), repeats=repeats, device=device)
    name = "AdamW of 16 tenants: one parameter at a time / row steps"
    return Row.of(name, ratios, "ratio", "higher", target=4.0)


def parking_rows(model_dir: Path, device: str) -> list[Row]:
    """Return what it takes to park a run and to bring it back, by a step of a small batch."""
    engine = Engine.load(model_dir, device=device, max_resident_runs=2, num_threads=1)
    engine.create_run("run", LoraConfig(rank=RANK, seed=0))
    batch = [datum(row) for row in Case("", 1, (32,), {}).batches()[0]]
    seconds: dict[str, list[float]] = {"park": [], "back": [], "step": []}
    for _ in range(20):
        begin_s = time.perf_counter()
        engine.forward_backward("run", batch, "cross_entropy", {})
        engine.optim_step("run", AdamParams())
        seconds["step"].append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        state = engine.export_state("run")
        engine.drop_run("run")
        seconds["park"].append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        engine.import_state("run", state)
        seconds["back"].append(time.perf_counter() - begin_s)
    step_s = float(np.median(seconds["step"]))
    return [
        Row.of(name, [value / step_s for value in seconds[key]], "steps of 1x32", "lower")
        for key, name in (
            ("park", "a run to host memory"),
            ("back", "a run from host memory back into the engine"),
        )
    ]


def memory_rows(model_dir: Path, vocabulary_dir: Path) -> list[Row]:
    """Return peaks of memory, each measured in a process of its own."""
    parked = _measure(["parked", str(model_dir)])
    head = _measure(["head", str(vocabulary_dir)])
    logits_mib = head["num_tokens"] * _LARGE_VOCABULARY * 4 / _MEBIBYTE
    return [
        Row(
            name=f"peak with {_NUM_PARKED} parked and {_NUM_ACTIVE} active runs, above the model",
            value=round(parked["peak_mib"], 1),
            unit="MiB",
            better="lower",
        ),
        Row(
            name=f"of which rows: ({_NUM_PARKED} x 3 + {_NUM_ACTIVE} x 4) numbers by parameter",
            value=round(parked["rows_mib"], 1),
            unit="MiB",
            better="lower",
        ),
        Row(
            name=f"forward_backward of {head['num_tokens']:.0f} tokens, vocabulary "
            f"{_LARGE_VOCABULARY}: peak / [T, V] in float32 ({logits_mib:.0f} MiB)",
            value=round(head["peak_mib"] / logits_mib, 3),
            unit="ratio",
            better="lower",
            target=0.25,
        ),
    ]


def _measure(arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.engine_memory", *arguments]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def scratch_dir() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for models."""
    return tempfile.TemporaryDirectory(prefix="tinsmith-bench-")
