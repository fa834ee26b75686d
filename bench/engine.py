"""The packed engine against PEFT, one tenant after another, side by side in one process.

`python -m bench.engine` builds a tiny Qwen3 (hidden 256, 4 layers, vocabulary 4096). Each tenant
has an adapter of rank 16 on all linear layers. Both sides take the same training steps: forward,
backward, AdamW. PEFT switches adapters with `set_adapter`; the engine computes all tenants
in one pass. Sides take turns, and a figure is the median of the ratios of neighbouring turns, since
other work on the machine slows both. On a CPU everything runs on one thread.

With `--device cuda` the same runs on a GPU, and on a model of four times the width as well.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench import engine_figures, report
from bench.paired_runs import Case, EngineSide, PeftSide, build_model, compare
from tinsmith_engine.base.memory import keep_freed_memory

_console = Console(highlight=False, stderr=True)
_LARGE_VOCABULARY = 151_936

CASES = (
    Case("16 tenants x (1x32)", 16, (32,), {"float32": 5.0, "bfloat16": 5.0}),
    Case("32 tenants x (1x16)", 32, (16,), {"float32": 6.0, "bfloat16": 6.0}),
    Case("16 tenants x (4x64)", 16, (64,) * 4, {"float32": 1.7, "bfloat16": 2.5}),
    Case("16 tenants x 4 ragged (16-128)", 16, None, {"bfloat16": 2.5}),
    Case("1 tenant x (1x32)", 1, (32,), {"float32": 1.0, "bfloat16": 1.0}),
    Case("1 tenant x (8x128)", 1, (128,) * 8, {"float32": 1.0, "bfloat16": 1.0}),
)


def peft_rows(
    model_dir: Path,
    cases: Sequence[Case],
    dtype: str,
    device: str,
    *,
    compiled: bool,
    repeats: int,
) -> list[report.Row]:
    """Return the speed of the engine over that of sequential PEFT."""
    rows = []
    for case in cases:
        batches = case.batches()
        peft = PeftSide(model_dir, getattr(torch, dtype), case.num_tenants, device)
        engine = EngineSide(model_dir, dtype, case.num_tenants, device, compiled=compiled)
        ratios = compare(
            lambda: peft.step(batches),  # noqa: B023 - called before the next round
            lambda: engine.step(batches),  # noqa: B023
            repeats=repeats,
            device=device,
        )
        mode = "compiled" if compiled else "eager"
        name = f"{case.name}, {dtype}, {mode}: engine / sequential PEFT"
        target = case.targets.get(dtype) if compiled else None
        rows.append(report.Row.of(name, ratios, "ratio", "higher", target=target))
        _console.print(f"{name}: {rows[-1].value:.2f}")
    return rows


def run(arguments: argparse.Namespace, folder: Path) -> list[report.Row]:
    """Return all rows."""
    tiny, device, repeats = folder / "tiny", arguments.device, arguments.repeats
    build_model(tiny)
    cases = [case for case in CASES if arguments.only in case.name]
    rows = []
    for compiled in (True, False) if arguments.eager else (True,):
        for dtype in arguments.dtypes:
            rows += peft_rows(tiny, cases, dtype, device, compiled=compiled, repeats=repeats)
    if arguments.only:
        return rows
    for dtype in arguments.dtypes:
        rows += engine_figures.exactness_rows(
            tiny, (CASES[0], CASES[2]), dtype, device, compiled=True, repeats=repeats
        )
        rows.append(engine_figures.sharing_row(tiny, dtype, device, compiled=True, repeats=repeats))
    rows.append(engine_figures.optimizer_row(tiny, device, repeats=repeats))
    rows += engine_figures.parking_rows(tiny, device)
    if device == "cpu":
        large = folder / "large-vocabulary"
        build_model(large, vocab_size=_LARGE_VOCABULARY)
        rows += engine_figures.memory_rows(tiny, large)
    else:
        wide = folder / "wide"
        build_model(wide, scale=4)
        rows += peft_rows(wide, cases, "bfloat16", device, compiled=True, repeats=repeats)
    return rows


def main() -> None:
    """Run the comparison and write `bench/results/engine.json`, or `engine-gpu.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--eager", action="store_true", help="also with kernels not compiled")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    keep_freed_memory()
    torch.set_num_threads(1)
    with engine_figures.scratch_dir() as folder:
        rows = run(arguments, Path(folder))
    is_gpu = arguments.device != "cpu"
    machine = report.machine() | {"torch": torch.__version__, "threads": 1}
    if is_gpu:
        machine["gpu"] = torch.cuda.get_device_name(arguments.device)
    report.show("The engine against sequential PEFT", rows, machine)
    if not arguments.only:
        report.write("engine-gpu" if is_gpu else "engine", rows, machine)


if __name__ == "__main__":
    main()
