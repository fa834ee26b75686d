"""What one project that floods the service costs another: latency, and shares of what both want.

`python -m bench.fairness` starts the embedded server. A quiet project does one thing after the
other and notes how long each takes: alone, and beside a project that keeps a hundred of the same in
flight, from a process of its own. That is done for training steps, samples, completions of the
OpenAI API, episodes and control calls, and for training steps beside one large operation after the
other. Then two projects with as many runs share training and
sampling, one with 16 loops and one with a hundred. Jain's index of what they got is 1 if that was
equal.

Client, flood and server share the cores of one machine: `alone` has them for itself, so the ratio
holds what a flood costs in client and server alike.

Source of the index: Jain, Chiu, Hawe 1984, DEC-TR-301.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

import tinsmith
from bench import report
from bench.paired_runs import VOCAB, build_model
from bench.processes import Server
from bench.service_side import wait_served

_FLOOD, _MODEST = 100, 16
_FLOOD_RUNS = 16
_LARGE = "large"
_COUNTS = {
    "training": 60,
    "sampling": 60,
    "openai": 60,
    "episodes": 100,
    "control": 300,
    _LARGE: 40,
}
_SHARED = ("training", "sampling")
_MAX_RATIO, _MIN_JAIN = 2.0, 0.95
_NUM_TOKENS, _MAX_TOKENS = 32, 16
_LARGE_TOKENS, _LARGE_DATUMS = 257, 150
_SHARE_S = 15.0
_ADAM = tinsmith.AdamParams(learning_rate=1e-4)
_console = Console(highlight=False, stderr=True)

Floats = NDArray[np.float64]
Act = Callable[[int], Awaitable[object]]


async def actor(client: tinsmith.Client, key: str, kind: str, *, num_runs: int = 1) -> Act:
    """Return what does one thing of a kind; its argument tells the loops of a flood apart."""
    random = np.random.default_rng(0)

    def tokens(count: int = _NUM_TOKENS) -> list[int]:
        return [int(token) for token in random.integers(0, VOCAB, count)]

    if kind in ("training", _LARGE):
        runs = [
            await client.create_lora_training_run_async("bench", rank=8, seed=1)
            for _ in range(num_runs)
        ]
        # Those of the flood, which has several runs, are large; those of the quiet project are not.
        is_large = kind == _LARGE and num_runs > 1
        rows = [tokens(_LARGE_TOKENS) for _ in range(_LARGE_DATUMS)] if is_large else [tokens()]
        data = [
            tinsmith.Datum(
                tinsmith.ModelInput.from_ints(row[:-1]),
                {"target_tokens": np.array(row[1:]), "weights": np.ones(len(row) - 1, np.float32)},
            )
            for row in rows
        ]

        async def train(loop: int) -> None:
            run = runs[loop % len(runs)]
            gradient = await run.forward_backward_async(data, "cross_entropy")
            step = await run.optim_step_async(_ADAM)
            await gradient
            await step

        return train
    if kind == "sampling":
        sampler = await client.create_sampler_async(base_model="bench")
        params = tinsmith.SamplingParams(max_tokens=_MAX_TOKENS, stop=[])

        async def sample(_: int) -> None:
            await sampler.sample_async(tokens(), 1, params)

        return sample
    if kind == "openai":
        http = httpx.AsyncClient(
            base_url=f"http://{client.address}/v1",
            headers={"authorization": f"Bearer {key}"},
            timeout=300,
        )

        async def complete(_: int) -> None:
            body = {"model": "bench", "prompt": tokens(), "max_tokens": _MAX_TOKENS}
            while (await http.post("/completions", json=body)).status_code == 429:
                await asyncio.sleep(0.2)

        return complete
    if kind == "episodes":
        agents = [client.episodes.agent(client_id=f"agent-{index}") for index in range(_FLOOD)]

        async def play(loop: int) -> None:
            agent = agents[loop % len(agents)]
            await client.episodes.create_async([tinsmith.EpisodeSpec({"q": "1"})])
            uuid, _ = await agent.begin_episode_async()
            await agent.end_episode_async(uuid, tinsmith.WorkflowOutput(1.0))

        return play

    async def ask(_: int) -> None:
        await client.runs.list_async()

    return ask


async def latencies(act: Act, count: int) -> Floats:
    """Do one after the other; return the seconds of each."""
    seconds = []
    for _ in range(count):
        begin_s = time.perf_counter()
        await act(0)
        seconds.append(time.perf_counter() - begin_s)
    return np.array(seconds)


async def loops(act: Act, num_loops: int, duration_s: float) -> int:
    """Keep as many in flight for a time; return how many were done."""
    end_s = time.monotonic() + duration_s
    done = 0

    async def loop(index: int) -> None:
        nonlocal done
        while time.monotonic() < end_s:
            await act(index)
            done += time.monotonic() < end_s

    await asyncio.gather(*(loop(index) for index in range(num_loops)))
    return done


class Flood:
    """A process that keeps a hundred of a kind in flight, until it is told to stop."""

    def __init__(self, address: str, key: str, kind: str, *, duration_s: float = 3600) -> None:
        command = [sys.executable, "-m", "bench.fairness", "--flood", kind, address, key]
        self._process = subprocess.Popen(
            [*command, str(duration_s)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._lines = self._process.stdout
        if self._lines.readline().strip() != "begun":
            raise RuntimeError("the flood did not begin")

    def result(self) -> int:
        """Return how much it did, once its time is over."""
        return int(self._lines.readline())

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


async def flood(kind: str, address: str, key: str, duration_s: float) -> None:
    """Be such a process."""
    retry = tinsmith.RetryPolicy(budget_s=3600)
    with tinsmith.Client(address, key, retry=retry, operation_timeout_s=3600) as client:
        act = await actor(client, key, kind, num_runs=_FLOOD_RUNS)
        if kind != _LARGE:
            await act(0)
        print("begun", flush=True)
        print(await loops(act, 1 if kind == _LARGE else _FLOOD, duration_s), flush=True)


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1 / n if one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def measure(
    quiet: tinsmith.Client, address: str, keys: Sequence[str], kind: str, repeats: int
) -> tuple[Floats, Floats]:
    """Return the seconds of what a quiet project does, alone and beside a flood."""

    async def go() -> tuple[Floats, Floats]:
        act = await actor(quiet, keys[0], kind)
        await latencies(act, 10)
        alone, beside = [], []
        for _ in range(repeats):
            alone.append(await latencies(act, _COUNTS[kind]))
            loud = await asyncio.to_thread(Flood, address, keys[1], kind)
            try:
                await asyncio.sleep(2)
                beside.append(await latencies(act, _COUNTS[kind]))
            finally:
                await asyncio.to_thread(loud.stop)
            # What it had accepted ends, or is given up.
            await asyncio.sleep(3)
        return np.concatenate(alone), np.concatenate(beside)

    return asyncio.run(go())


def shares(quiet: tinsmith.Client, address: str, keys: Sequence[str], kind: str) -> tuple[int, int]:
    """Return what a modest and a loud project get done in the same time."""

    async def go() -> tuple[int, int]:
        act = await actor(quiet, keys[0], kind, num_runs=_FLOOD_RUNS)
        await act(0)
        loud = await asyncio.to_thread(lambda: Flood(address, keys[1], kind, duration_s=_SHARE_S))
        try:
            mine = await loops(act, _MODEST, _SHARE_S)
            return mine, await asyncio.to_thread(loud.result)
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


def main() -> None:
    """Run the benchmark and write `bench/results/fairness.json` and its curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", default=list(_COUNTS))
    parser.add_argument("--flood", nargs=4, metavar=("KIND", "ADDRESS", "KEY", "SECONDS"))
    arguments = parser.parse_args()
    if arguments.flood:
        kind, address, key, duration_s = arguments.flood
        asyncio.run(flood(kind, address, key, float(duration_s)))
        return
    torch.set_num_threads(1)
    rows: list[report.Row] = []
    found: dict[str, tuple[Floats, Floats]] = {}
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as name:
        folder = Path(name)
        build_model(folder / "model", with_tokenizer=True)
        with Server(folder / "server", folder / "model", num_threads=1) as server:
            address, api_key = server.wait_ready()
            with tinsmith.Client(address, api_key) as operator:
                wait_served(operator)
                keys = [operator.keys.create(project=name).secret for name in ("quiet", "loud")]
                with tinsmith.Client(address, keys[0], operation_timeout_s=600) as quiet:
                    for kind in arguments.kinds:
                        found[kind] = measure(quiet, address, keys, kind, arguments.repeats)
                        rows += latency_rows(kind, *found[kind])
                        _console.print(f"{kind}: p99 {rows[-1].value:.2f} of alone")
                    for kind in (each for each in _SHARED if each in arguments.kinds):
                        done = shares(quiet, address, keys, kind)
                        rows.append(
                            report.Row.of(
                                f"{kind}: Jain's index, {_MODEST} and {_FLOOD} loops, "
                                f"{done[0]} and {done[1]} done",
                                [jain(done)],
                                "index",
                                "higher",
                                target=_MIN_JAIN,
                            )
                        )
    machine = report.machine() | {"threads": 1}
    report.show("A quiet project beside one that floods", rows, machine)
    report.write("fairness", rows, machine)
    draw(found, report.RESULTS_DIR / "fairness.png")


def _beside(kind: str) -> str:
    is_large = kind == _LARGE
    return f"one of {(_LARGE_TOKENS - 1) * _LARGE_DATUMS} tokens" if is_large else "a flood"


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
