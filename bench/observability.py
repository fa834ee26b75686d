"""What watching costs a training: metrics and logs, traces, an open page with 50 runs.

`python -m bench.observability` starts one embedded server on a model of a real width. A run trains
there in short blocks, each with something switched on and off again, in alternating order. What
watches is outside: a scraper, a collector of traces in a process of its own, a reader of the stream
that the page of runs keeps open.

The engine's thread computes the same in every block. Its time varies more between blocks than
watching costs, so figures are of CPU time elsewhere: all other threads of the server, and the
client. They are shares of the CPU time of a whole step. A page and a scraper ask by the clock; what
they cost each second is the share of a step that keeps a core busy. CPU time does not grow by what
other programs do, wall time does: its ratios are there to show that nothing waits, and have no
target.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
from rich.console import Console

import tinsmith
from bench import report
from bench.machine_load import NoiseMeter, process_cpu_s, thread_cpu_s
from bench.trace_switch import TraceSwitch
from bench.watchers import Collector, PageReader, WatchedServer, overview_names, scrape
from tinsmith.tracing import spans
from tinsmith.v1 import run_metrics_pb2, run_metrics_pb2_grpc
from tinsmith_local.process import free_port
from tinsmith_local.random_model import build_random_model

_SHAPE, _NUM_LAYERS, _RANK, _NUM_TOKENS = "smollm2-135m", 2, 8, 64
_NUM_RUNS, _NUM_DRAWN, _CURVE_STEPS = 50, 4, 300
_NUM_SCRAPES = 20
# Of the chart's monitors by default, and what is asked for where curves are watched closely.
_SCRAPE_INTERVAL_S, _OFTEN_S = 15.0, 1.0
_RECORDED_AFTER_S = 1.5
_TIMEOUT_S = 60.0
_ADAM = tinsmith.AdamParams(learning_rate=1e-4)
_console = Console(highlight=False, stderr=True)


@dataclass(frozen=True, slots=True)
class Block:
    """What some steps took.

    Attributes:
        num_steps: How many.
        steps_s: Wall time of the steps.
        wall_s: Wall time of the block, with what came after the steps.
        cpu_s: CPU time of server and client.
        beside_s: Of that, what was not the engine's thread.
    """

    num_steps: int
    steps_s: float
    wall_s: float
    cpu_s: float
    beside_s: float


Pair = tuple[Block, Block]
"""A block with something on, and its neighbour with it off."""


def added_by_step(pairs: Sequence[Pair]) -> list[float]:
    """Return the CPU time that each pair added beside the engine, as shares of that of a step."""
    return [
        (on.beside_s / on.num_steps - off.beside_s / off.num_steps) / (off.cpu_s / off.num_steps)
        for on, off in pairs
    ]


def added_by_second(pairs: Sequence[Pair]) -> list[float]:
    """Return the CPU time that each pair added beside the engine, as shares of a core.

    What the steps take by themselves is taken away by their number, not by the clock.
    """
    return [
        (on.beside_s - off.beside_s * on.num_steps / off.num_steps) / on.wall_s for on, off in pairs
    ]


def wall_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Return the wall time of a step with something on over that with it off."""
    return [(on.steps_s / on.num_steps) / (off.steps_s / off.num_steps) for on, off in pairs]


def noise_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Return the wall time of steps with it off, over that of the block before with it off."""
    offs = [off.steps_s / off.num_steps for _, off in pairs]
    return [later / before for before, later in pairwise(offs)]


class Trained:
    """A run that trains in blocks, and what they take."""

    def __init__(self, server: WatchedServer, run: tinsmith.TrainingRun) -> None:
        self._pid = server.pid
        self._run = run
        tokens = np.random.default_rng(0).integers(3, 40_000, _NUM_TOKENS + 1)
        weights = np.ones(_NUM_TOKENS, np.float32)
        self._data = [
            tinsmith.Datum(
                tinsmith.ModelInput.from_ints(tokens[:-1]),
                {"target_tokens": tokens[1:], "weights": weights},
            )
        ]
        self._step()
        before = thread_cpu_s(self._pid)
        self._step()
        # By far the most of the CPU time of a step is that of its products.
        used = {each: s - before.get(each, s) for each, s in thread_cpu_s(self._pid).items()}
        self._engine_thread = max(used, key=lambda each: used[each])

    def cpu_s(self) -> float:
        """Return the CPU time of server and client so far."""
        return process_cpu_s(self._pid) + time.process_time()

    def block(
        self,
        watched: AbstractContextManager[None],
        *,
        num_steps: int,
        least_s: float,
        after_s: float,
    ) -> Block:
        """Train within a context, whose end counts as well.

        Args:
            watched: Has something on.
            num_steps: At least so many.
            least_s: At least so long.
            after_s: How long what was begun has to come to an end.
        """
        done = 0
        with watched:
            begin = (time.perf_counter(), self.cpu_s(), self._engine_s())
            while done < num_steps or time.perf_counter() - begin[0] < least_s:
                self._step()
                done += 1
            steps_s = time.perf_counter() - begin[0]
        time.sleep(after_s)
        cpu_s, engine_s = self.cpu_s() - begin[1], self._engine_s() - begin[2]
        return Block(done, steps_s, time.perf_counter() - begin[0], cpu_s, cpu_s - engine_s)

    def pairs(
        self,
        on: Callable[[], AbstractContextManager[None]],
        off: Callable[[], AbstractContextManager[None]],
        num_pairs: int,
        *,
        num_steps: int = 1,
        least_s: float = 0.0,
        after_s: float = 0.0,
    ) -> list[Pair]:
        """Train with something on and off in turns, each of them first in every other pair."""
        found = []
        for index in range(num_pairs):
            order = (on, off) if index % 2 else (off, on)
            blocks = [
                self.block(make(), num_steps=num_steps, least_s=least_s, after_s=after_s)
                for make in order
            ]
            found.append((blocks[1 - index % 2], blocks[index % 2]))
        return found

    def _step(self) -> None:
        with spans.block("step", begins=True):
            gradient = self._run.forward_backward(self._data, "cross_entropy")
            update = self._run.optim_step(_ADAM)
            gradient.result()
            update.result()

    def _engine_s(self) -> float:
        return thread_cpu_s(self._pid)[self._engine_thread]


@contextmanager
def _switched(switch: Callable[[bool], None], is_on: bool) -> Iterator[None]:
    """Switch something for a block; afterwards it is off."""
    switch(is_on)
    try:
        yield
    finally:
        switch(False)


def metrics_rows(
    trained: Trained, server: WatchedServer, metrics_address: str, num_pairs: int, num_steps: int
) -> list[report.Row]:
    """Compare steps that are counted and logged with steps that are not, and time a scrape."""

    def switched(is_on: bool) -> Callable[[], AbstractContextManager[None]]:
        return lambda: _switched(lambda to: server.switch("metrics", to), is_on)

    pairs = trained.pairs(
        switched(True), switched(False), num_pairs, num_steps=num_steps, after_s=_RECORDED_AFTER_S
    )
    server.switch("metrics", True)
    scrapes_s = []
    num_lines = 0
    for _ in range(_NUM_SCRAPES):
        begin_s = process_cpu_s(server.pid)
        num_lines = scrape(metrics_address)
        scrapes_s.append(process_cpu_s(server.pid) - begin_s)
    counted = added_by_step(pairs)
    scrape_s = float(np.median(scrapes_s))
    return [
        report.Row.of(
            f"metrics, logs and a scrape every {_SCRAPE_INTERVAL_S:g} s: CPU added to a step",
            [share + scrape_s / _SCRAPE_INTERVAL_S for share in counted],
            "share",
            "lower",
            target=0.01,
        ),
        report.Row.of(
            f"... with a scrape every {_OFTEN_S:g} s",
            [share + scrape_s / _OFTEN_S for share in counted],
            "share",
            "lower",
        ),
        report.Row.of("... of that, calls of metrics and logs", counted, "share", "lower"),
        report.Row.of(
            f"CPU of a scrape of {num_lines} lines",
            [1e3 * each for each in scrapes_s],
            "ms",
            "lower",
        ),
        *_wall_rows("metrics and logs", pairs),
    ]


def trace_rows(
    trained: Trained,
    set_traces: Callable[[bool], None],
    collector: Collector,
    num_pairs: int,
    num_steps: int,
) -> list[report.Row]:
    """Compare steps that are traced, in client and server, with steps that are not."""
    begin = collector.num_spans
    pairs = trained.pairs(
        lambda: _switched(set_traces, True),
        lambda: _switched(set_traces, False),
        num_pairs,
        num_steps=num_steps,
    )
    by_step = (collector.num_spans - begin) / sum(on.num_steps for on, _ in pairs)
    if by_step < 1:
        raise RuntimeError("the collector got no spans")
    return [
        report.Row.of(
            f"traces on, {by_step:.1f} spans a step: CPU added to a step",
            added_by_step(pairs),
            "share",
            "lower",
            target=0.03,
        ),
        *_wall_rows("traces", pairs),
    ]


def page_rows(
    trained: Trained, reader: PageReader, num_pairs: int, least_s: float
) -> list[report.Row]:
    """Compare steps beside an open page of runs with steps without it."""

    @contextmanager
    def closed() -> Iterator[None]:
        yield

    pairs = trained.pairs(reader.open, closed, num_pairs, least_s=least_s)
    events = reader.num_events / sum(on.wall_s for on, _ in pairs)
    return [
        report.Row.of(
            f"page open with {_NUM_RUNS} runs, {_NUM_DRAWN} of them drawn, {events:.1f} events a "
            "second: CPU added, of a core",
            added_by_second(pairs),
            "share",
            "lower",
            target=0.02,
        ),
        *_wall_rows("page open", pairs),
    ]


def _wall_rows(what: str, pairs: Sequence[Pair]) -> list[report.Row]:
    return [
        report.Row.of(f"{what}: wall time of a step, on / off", wall_ratios(pairs), "x", "lower"),
        report.Row.of(
            f"{what}: wall time of a step, off / off before", noise_ratios(pairs), "x", "lower"
        ),
        report.Row.of(
            f"{what}: CPU time of a step, off",
            [1e3 * off.cpu_s / off.num_steps for _, off in pairs],
            "ms",
            "lower",
        ),
        report.Row.of(
            "... of that, beside the engine's thread",
            [1e3 * off.beside_s / off.num_steps for _, off in pairs],
            "ms",
            "lower",
        ),
    ]


def fill(client: tinsmith.Client, key: str) -> list[tinsmith.TrainingRun]:
    """Make the runs of the page, each with curves."""
    noise, names = random.Random(0), overview_names()
    runs = [
        client.create_lora_training_run("bench", rank=_RANK, seed=seed) for seed in range(_NUM_RUNS)
    ]
    metadata = (("authorization", f"Bearer {key}"),)
    with grpc.insecure_channel(client.address) as channel:
        stub = run_metrics_pb2_grpc.RunMetricsServiceStub(channel)
        for run in runs:
            request = run_metrics_pb2.RecordRunMetricsRequest(run=run.name)
            for step in range(_CURVE_STEPS):
                values = {name: noise.random() for name in names if "/" not in name}
                request.records.add(step=step, metrics=values)
            stub.RecordRunMetrics(request, metadata=metadata, timeout=_TIMEOUT_S)
    return runs


def _measure(
    folder: Path, arguments: argparse.Namespace
) -> tuple[list[report.Row], dict[str, float]]:
    model = build_random_model(folder / "model", _SHAPE, num_layers=_NUM_LAYERS)
    metrics_address = f"127.0.0.1:{free_port()}"
    pairs, steps = arguments.pairs, arguments.steps
    with (
        Collector(folder) as collector,
        WatchedServer(
            folder / "server",
            model,
            collector=collector.endpoint,
            metrics_address=metrics_address,
        ) as server,
    ):
        ours = TraceSwitch(collector.endpoint)

        def set_traces(is_on: bool) -> None:
            server.switch("traces", is_on)
            ours.set(is_on)

        # On while channels are made; see the server's own.
        set_traces(True)
        with tinsmith.Client(server.address, server.api_key) as client:
            runs = fill(client, server.api_key)
            trained = Trained(server, runs[-1])
            set_traces(False)
            meter = NoiseMeter(trained.cpu_s)
            rows = metrics_rows(trained, server, metrics_address, pairs, steps)
            _console.print(f"{rows[0].name}: {rows[0].value:.4f}")
            rows += trace_rows(trained, set_traces, collector, pairs, steps)
            _console.print(f"{rows[-5].name}: {rows[-5].value:.4f}")
            # The newest runs are drawn at first, and the last one is that which trains.
            drawn = [run.name.rpartition("/")[2] for run in runs[-_NUM_DRAWN:]]
            with PageReader(folder, server.address, server.api_key, drawn) as reader:
                rows += page_rows(trained, reader, arguments.page_pairs, arguments.page_s)
            return rows, meter.describe()


def main() -> int:
    """Run the benchmark and write `bench/results/observability.json`."""
    parser = argparse.ArgumentParser(prog="python -m bench.observability", description=__doc__)
    parser.add_argument("--pairs", type=int, default=12, help="of metrics, and of traces")
    parser.add_argument("--steps", type=int, default=4, help="of a block of those")
    parser.add_argument("--page-pairs", type=int, default=6)
    parser.add_argument("--page-s", type=float, default=4.0, help="of a block of the page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as name:
        rows, conditions = _measure(Path(name), arguments)
    step = f"{_SHAPE}, {_NUM_LAYERS} layers, rank {_RANK}, 1x{_NUM_TOKENS}"
    sizes = (
        f"{arguments.pairs} pairs of {arguments.steps} steps, {arguments.page_pairs} of the page"
    )
    machine = report.machine() | {"threads": 1, "step": step, "blocks": sizes} | conditions
    report.show("What watching costs", rows, machine)
    report.write("observability", rows, machine)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
