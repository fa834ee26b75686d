"""What one project that wants much costs another: latency, and shares of what both want.

`python -m bench.fairness` starts the embedded server. A quiet project does one thing after the
other and notes how long each takes: alone, and beside a project that keeps a hundred of the same in
flight, from a process of its own. That is done for training steps, samples, completions of the
OpenAI API, episodes and control calls. Training steps are measured beside one large operation after
the other as well. Then two projects with as many runs share training and sampling, one with 16
loops and one with a hundred. Jain's index of what they got is 1 if that was equal.

At last a project with four keys wants four times as much as one with a single key and as many runs.
The server's bounds are so low that both meet them. The share of the single key is half if keys do
not count: of calls, polls, forms, uploads, samples, steps, and of checkpoints that are stored.

Client, flood and server share the cores of one machine: `alone` has them for itself, so the ratio
holds what a flood costs in client and server alike.

Source of the index: Jain, Chiu, Hawe 1984, DEC-TR-301.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

import tinsmith
from bench import report
from bench.neighbours import (
    FORMS_MODEL,
    KINDS,
    LARGE_DATUMS,
    LARGE_TOKENS,
    NUM_FLOOD_LOOPS,
    NUM_RUNS,
    Act,
    Flood,
    Neighbour,
    loops,
)
from bench.paired_runs import build_model
from tinsmith_local.process import ServerProcess

_MODEST = 16
_COUNTS = {
    "training": 60,
    "sampling": 60,
    "openai": 60,
    "episodes": 100,
    "control": 300,
    "large": 40,
}
_SHARED = ("training", "sampling")
_BY_KEYS = ("control", "polls", "forms", "uploads", "sampling", "training", "stored")
_NUM_KEYS, _LOOPS_OF_KEY = 4, 48
_UPLOADS_OF_KEY = 16
"""Twice what a project may have under way. What is refused costs the client that asks: a flood of
uploads beyond that delays its own."""
_TIGHT = """
[gateway]
max_waits = 48
[trainer]
max_project_checkpoints = 40
"""
_MAX_RATIO, _MIN_JAIN = 2.0, 0.95
_MIN_SHARE = 0.9
_SHARE_S = 15.0
_console = Console(highlight=False, stderr=True)

Floats = NDArray[np.float64]


async def latencies(act: Act, count: int) -> Floats:
    """Do one after the other; return the seconds of each."""
    seconds = []
    for _ in range(count):
        begin_s = time.perf_counter()
        await act(0)
        seconds.append(time.perf_counter() - begin_s)
    return np.array(seconds)


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1 / n if one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def measure(quiet: Neighbour, loud_key: str, kind: str, repeats: int) -> tuple[Floats, Floats]:
    """Return the seconds of what a quiet project does, alone and beside a flood."""

    async def go() -> tuple[Floats, Floats]:
        act = await KINDS[kind](quiet)
        await latencies(act, 10)
        alone, beside = [], []
        # A large operation alone is what one loop has in flight.
        num_loops = 1 if kind == "large" else NUM_FLOOD_LOOPS
        for _ in range(repeats):
            alone.append(await latencies(act, _COUNTS[kind]))
            loud = await asyncio.to_thread(
                Flood, quiet.client.address, [loud_key], kind, num_loops=num_loops
            )
            try:
                loud.begin()
                await asyncio.sleep(2)
                beside.append(await latencies(act, _COUNTS[kind]))
            finally:
                await asyncio.to_thread(loud.stop)
            # What it had accepted ends, or is given up.
            await asyncio.sleep(3)
        return np.concatenate(alone), np.concatenate(beside)

    return asyncio.run(go())


def shares(
    mine: Neighbour, loud_keys: Sequence[str], kind: str, *, num_mine: int, num_loud: int
) -> tuple[int, int]:
    """Return what one key and the keys of another project get done in the same time."""

    async def go() -> tuple[int, int]:
        act = await KINDS[kind](mine)
        loud = await asyncio.to_thread(
            Flood,
            mine.client.address,
            loud_keys,
            kind,
            num_loops=num_loud,
            duration_s=_SHARE_S,
        )
        try:
            loud.begin()
            done = await loops([act], num_mine, _SHARE_S)
            return done, await asyncio.to_thread(loud.result)
        finally:
            loud.stop()

    return asyncio.run(go())


def draw(found: dict[str, tuple[Floats, Floats]], path: Path) -> None:
    """Draw the distributions as curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(4 * len(found), 3.4))
    for axis, (kind, (alone, beside)) in zip(np.atleast_1d(axes), found.items(), strict=True):
        for label, seconds in (("alone", alone), (f"beside {_beside(kind)}", beside)):
            ordered = np.sort(seconds) * 1e3
            axis.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=label)
        axis.set(xscale="log", xlabel="ms", title=kind)
        axis.legend()
    axes_list = np.atleast_1d(axes)
    axes_list[0].set_ylabel("share of calls")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


@contextlib.contextmanager
def projects(folder: Path, settings: str = "") -> Iterator[tuple[Neighbour, list[str]]]:
    """Serve with settings of pods; give a busy project, and the keys of a loud one."""
    config = folder.with_suffix(".toml")
    config.write_text(settings)
    # Forms need a tokenizer that the other model lacks.
    flags = ("--config", str(config), "--model", FORMS_MODEL)
    with (
        ServerProcess(folder, {"bench": folder.parent / "model"}, flags=flags) as server,
        tinsmith.Client(server.address, server.api_key) as operator,
    ):
        key = operator.keys.create(project="quiet").secret
        loud = [operator.keys.create(project="loud").secret for _ in range(_NUM_KEYS)]
        with tinsmith.Client(server.address, key, operation_timeout_s=600) as client:
            yield Neighbour(client=client, key=key, num_runs=NUM_RUNS), loud


def main() -> None:
    """Run the benchmark and write `bench/results/fairness.json` and its curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", default=list(_COUNTS))
    parser.add_argument("--by-keys", nargs="*", default=list(_BY_KEYS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[report.Row] = []
    found: dict[str, tuple[Floats, Floats]] = {}
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as name:
        folder = Path(name)
        build_model(folder / "model", with_tokenizer=True)
        with projects(folder / "server") as (busy, loud):
            quiet = dataclasses.replace(busy, num_runs=1)
            for kind in arguments.kinds:
                found[kind] = measure(quiet, loud[0], kind, arguments.repeats)
                rows += latency_rows(kind, *found[kind])
                _console.print(f"{kind}: p99 {rows[-1].value:.2f} of alone")
            for kind in (each for each in _SHARED if each in arguments.kinds):
                done = shares(busy, loud[:1], kind, num_mine=_MODEST, num_loud=NUM_FLOOD_LOOPS)
                rows.append(
                    report.Row.of(
                        f"{kind}: Jain's index, {_MODEST} and {NUM_FLOOD_LOOPS} loops, "
                        f"{done[0]} and {done[1]} done",
                        [jain(done)],
                        "index",
                        "higher",
                        target=_MIN_JAIN,
                    )
                )
        if arguments.by_keys:
            with projects(folder / "tight", _TIGHT) as (busy, loud):
                for kind in arguments.by_keys:
                    num_loops = _UPLOADS_OF_KEY if kind == "uploads" else _LOOPS_OF_KEY
                    done = shares(
                        busy, loud, kind, num_mine=num_loops, num_loud=_NUM_KEYS * num_loops
                    )
                    rows.append(key_row(kind, *done))
                    _console.print(f"{rows[-1].name}: {rows[-1].value:.2f} of half")
    machine = report.machine() | {"threads": 1}
    report.show("A quiet project beside one that floods", rows, machine)
    report.write("fairness", rows, machine)
    if found:
        draw(found, report.RESULTS_DIR / "fairness.png")


def key_row(kind: str, mine: int, loud: int) -> report.Row:
    """Return the share of one key beside four of another project, of half."""
    return report.Row.of(
        f"{kind}: share of 1 key beside {_NUM_KEYS} keys of a project, {mine} and {loud} done",
        [2 * mine / max(mine + loud, 1)],
        "of half",
        "higher",
        target=_MIN_SHARE,
    )


def _beside(kind: str) -> str:
    is_large = kind == "large"
    return f"one of {(LARGE_TOKENS - 1) * LARGE_DATUMS} tokens" if is_large else "a flood"


def latency_rows(kind: str, alone: Floats, beside: Floats) -> list[report.Row]:
    """Return the figures of a kind; the last one is the ratio."""
    row, beside_what = report.Row.of, _beside(kind)
    p99 = [float(np.percentile(seconds, 99)) * 1e3 for seconds in (alone, beside)]
    medians = [statistics.median(seconds.tolist()) * 1e3 for seconds in (alone, beside)]
    return [
        row(f"{kind}, alone: p50", [medians[0]], "ms", "lower"),
        row(f"{kind}, alone: p99", [p99[0]], "ms", "lower"),
        row(f"{kind}, beside {beside_what}: p50", [medians[1]], "ms", "lower"),
        row(f"{kind}, beside {beside_what}: p99", [p99[1]], "ms", "lower"),
        row(
            f"{kind}: p99 beside {beside_what} / alone",
            [p99[1] / p99[0]],
            "ratio",
            "lower",
            target=_MAX_RATIO,
        ),
    ]


if __name__ == "__main__":
    main()
