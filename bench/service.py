"""`make bench`: one run through the whole service against a bare transformers + PEFT loop.

Both sides are processes of their own with the same model, adapter, batches, dtype (float32),
optimizer settings and number of threads. They take turns in one run, in alternating order; what
idles meanwhile uses no CPU. The service side is what a user sees: SDK, gRPC, ledger with fsync,
engine. Its event loops, ledger and client run beside the engine's threads, on other cores if there
are any. Throughput is therefore also given by CPU second, where all of that counts.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tinsmith
from bench import report, workload
from bench.machine_load import NoiseMeter, fsync_ms
from bench.processes import Bare, Server
from bench.report import Row
from bench.service_side import ADAM, ServiceSide, make_data, wait_served
from bench.workload import TrainCase

_CASES = (
    TrainCase(num_sequences=32, num_tokens=256, num_steps=2, num_repeats=4),
    TrainCase(num_sequences=8, num_tokens=128, num_steps=8, num_repeats=6),
)
_CHECKED_STEPS = 4
_MINIMAL_TOKENS = 8
_MINIMAL_STEPS = 40
_MINIMAL_REPEATS = 6
_SAMPLING_REPEATS = 6
_LATENCY_REPEATS = 50
_WARM_UP_CALLS = 5
_MEBIBYTE = 2**20
_AHEAD, _AWAITED = "one step ahead", "each step awaited"
_BARE, _BARE_MERGED = "bare", "bare, merged"


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.service", description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on either side")
    parser.add_argument("--data-dir", type=Path, help="parent of the ledger's folder")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-bench-", dir=arguments.data_dir))
    threads: int = arguments.threads
    try:
        rows, conditions = _measure(folder, threads)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    machine = report.machine() | {"threads": threads, "dtype": "float32"} | conditions
    name = "service" if threads == 1 else f"service-{threads}-threads"
    path = report.write(name, rows, machine)
    report.show(f"service against bare transformers + PEFT, {threads} thread(s)", rows, machine)
    print(path)
    return 0


def _measure(folder: Path, num_threads: int) -> tuple[list[Row], dict[str, float]]:
    """Start both sides, run all cases, and return rows and the conditions they ran under."""
    model = folder / "model"
    command = [sys.executable, "-m", "bench.peft_baseline", "build", str(model)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    with Server(folder / "server", model, num_threads=num_threads) as server:
        address, api_key = server.wait_ready()
        loaded_bytes = server.peak_memory_bytes()
        with tinsmith.Client(address, api_key) as client:
            wait_served(client)
            run = client.create_lora_training_run("bench", rank=workload.RANK, seed=1)
            saved = run.save_weights_for_sampler("initial").result()
            with Bare(folder, model, _folder_of(saved), num_threads=num_threads) as bare:
                bare.wait_ready()
                rows = [
                    _memory_row("server", "after load", loaded_bytes),
                    _memory_row("bare", "after load", bare.peak_memory_bytes()),
                ]
                bench = ServiceBench(ServiceSide(server, run), bare)
                meter = NoiseMeter(bench.cpu_time_s)
                rows = bench.run_all() + rows
                conditions = {"fsync_ms": fsync_ms(folder)} | meter.describe()
    return rows, conditions


class ServiceBench:
    """The cases, each on both sides in turns.

    Args:
        service: The service with its run.
        bare: The bare loop's process; it begins with the weights of the run.
    """

    def __init__(self, service: ServiceSide, bare: Bare) -> None:
        self._service = service
        self._bare = bare

    def cpu_time_s(self) -> float:
        """Return the CPU time used so far by the server, the bare loop and this process."""
        return self._service.cpu_time_s() + self._bare.cpu_time_s()

    def run_all(self) -> list[Row]:
        """Measure everything, the largest batch first, so that the peak of memory is its own."""
        largest, *others = _CASES
        checks = [self._compare_losses()]
        throughput = self._throughput(largest)
        memory = [
            _memory_row("server", f"with {largest.name}", self._service.server.peak_memory_bytes()),
            _memory_row("bare", f"with {largest.name}", self._bare.peak_memory_bytes()),
        ]
        for case in others:
            throughput = self._throughput(case) + throughput
        latencies = [*self._minimal_step(), self._durable_no_op(), self._new_weights_sampled()]
        return (
            throughput + latencies + self._sampling() + memory + checks + [self._compare_samples()]
        )

    # Honesty: both sides must have computed the same.

    def _compare_losses(self) -> Row:
        """Take the first steps on both sides and compare the losses."""
        case = _CASES[-1]
        data = make_data(case.num_sequences, case.num_tokens)
        found = [self._service.step(data[step % len(data)]) for step in range(_CHECKED_STEPS)]
        wanted = self._train_bare(case, _CHECKED_STEPS)["losses"]
        errors = np.abs(np.array(found) / np.array(wanted) - 1.0)
        return Row.of(
            f"loss of the first {_CHECKED_STEPS} steps, largest relative difference",
            [float(errors.max())],
            "ratio",
            "lower",
            target=1e-5,
        )

    def _compare_samples(self) -> Row:
        """Sample with the live weights, and have the bare side load them and score the tokens."""
        saved = self._service.run.save_weights_for_sampler("end").result()
        prompts = workload.make_prompts()
        sampled = [result.sequences[0] for result in self._service.sample()]
        tokens = [
            [*prompt.tolist(), *sequence.tokens]
            for prompt, sequence in zip(prompts, sampled, strict=True)
        ]
        answer = self._bare.ask("score", adapter_dir=str(_folder_of(saved)), sequences=tokens)
        found = np.array([sequence.logprobs for sequence in sampled])
        wanted = np.array(answer["logprobs"])[:, -found.shape[1] :]
        return Row.of(
            "logprobs of samples, largest difference",
            [float(np.abs(found - wanted).max())],
            "nats",
            "lower",
            target=1e-4,
        )

    # Training.

    def _throughput(self, case: TrainCase) -> list[Row]:
        data = make_data(case.num_sequences, case.num_tokens)
        sides: dict[str, Callable[[], float]] = {
            _BARE: lambda: sum(self._train_bare(case, case.num_steps)["seconds"]),
            _AHEAD: functools.partial(self._service.train_ahead, data, case.num_steps),
            _AWAITED: functools.partial(self._service.train_awaited, data, case.num_steps),
        }
        self._train_bare(case, 1)
        self._service.step(data[0])
        durations_s, cpu_s = self._take_turns(sides, case.num_repeats)
        num_tokens = case.tokens_per_step * case.num_steps
        rows = [
            Row.of(
                f"{case.name} train, service / bare, {side}",
                _ratios(durations_s[_BARE], durations_s[side]),
                "ratio",
                "higher",
                target=1.0 if side == _AHEAD else None,
            )
            for side in (_AHEAD, _AWAITED)
        ]
        rows.append(
            Row.of(
                f"{case.name} train, service / bare, by CPU second",
                _ratios(cpu_s[_BARE], cpu_s[_AHEAD]),
                "ratio",
                "higher",
            )
        )
        rows += [
            Row.of(
                f"{case.name} train, {name}",
                [num_tokens / duration_s for duration_s in durations_s[side]],
                "tokens/s",
                "higher",
            )
            for name, side in (("service", _AHEAD), ("bare", _BARE))
        ]
        return rows

    def _minimal_step(self) -> list[Row]:
        case = TrainCase(
            num_sequences=1,
            num_tokens=_MINIMAL_TOKENS,
            num_steps=_MINIMAL_STEPS,
            num_repeats=_MINIMAL_REPEATS,
        )
        data = make_data(case.num_sequences, case.num_tokens)
        self._train_bare(case, _WARM_UP_CALLS)
        self._repeat(_WARM_UP_CALLS, lambda: self._service.step(data[0]))
        service_ms, bare_ms = [], []
        for _ in range(case.num_repeats):
            seconds = self._train_bare(case, case.num_steps)["seconds"]
            bare_ms.append(statistics.median(seconds) * 1e3)
            batches = [data[step % len(data)] for step in range(case.num_steps)]
            durations_ms = [
                self._time_ms(functools.partial(self._service.step, b)) for b in batches
            ]
            service_ms.append(statistics.median(durations_ms))
        more_ms = [a - b for a, b in zip(service_ms, bare_ms, strict=True)]
        return [
            Row.of("1x8 step, service - bare", more_ms, "ms", "lower", target=10.0),
            Row.of("1x8 step, service, fsync included", service_ms, "ms", "lower"),
            Row.of("1x8 step, bare", bare_ms, "ms", "lower"),
        ]

    def _durable_no_op(self) -> Row:
        token = make_data(1, 1)[0]
        durations_ms = self._repeat(
            _LATENCY_REPEATS, lambda: self._service.run.forward(token).result()
        )
        return _latency_row("durable no-op (forward of 1 token), p50", durations_ms, target=25.0)

    def _new_weights_sampled(self) -> Row:
        """Time optim_step to the first token of the new weights, each result awaited."""
        sampler = self._service.run.sampler()
        data = make_data(1, _MINIMAL_TOKENS)[0]
        prompt = workload.make_prompts()[0].tolist()
        params = tinsmith.SamplingParams(max_tokens=1, stop=[])

        def step_and_sample() -> None:
            version = self._service.run.optim_step(ADAM).result().version
            sequence = sampler.sample(prompt, sampling_params=params).result().sequences[0]
            if sequence.versions[0] != version:
                raise RuntimeError(f"sampled from {sequence.versions[0]}, not {version}")

        durations_ms = []
        for _ in range(_LATENCY_REPEATS):
            self._service.run.forward_backward(data).result()
            durations_ms.append(self._time_ms(step_and_sample))
        return _latency_row(
            "optim_step -> token of the new weights, p50", durations_ms[1:], target=50.0
        )

    def _train_bare(self, case: TrainCase, num_steps: int) -> dict[str, list[float]]:
        return self._bare.ask(
            "train",
            num_sequences=case.num_sequences,
            num_tokens=case.num_tokens,
            num_steps=num_steps,
        )

    # Sampling.

    def _sampling(self) -> list[Row]:
        sides: dict[str, Callable[[], float]] = {
            "service": lambda: self._time_ms(self._service.sample) / 1e3,
            _BARE: lambda: self._generate_s(is_merged=False),
            _BARE_MERGED: lambda: self._generate_s(is_merged=True),
        }
        for measure in sides.values():
            measure()
        durations_s, cpu_s = self._take_turns(sides, _SAMPLING_REPEATS)
        name = f"{workload.NUM_PROMPTS}x{workload.SAMPLED_TOKENS} sample"
        num_tokens = workload.NUM_PROMPTS * workload.SAMPLED_TOKENS
        service_s = durations_s["service"]
        rows = [
            Row.of(
                f"{name}, service / HF generate with {adapter}",
                _ratios(durations_s[side], service_s),
                "ratio",
                "higher",
                target=1.0 if side == _BARE else None,
            )
            for side, adapter in ((_BARE, "PEFT adapter"), (_BARE_MERGED, "merged adapter"))
        ]
        rows.append(
            Row.of(
                f"{name}, service / HF generate, by CPU second",
                _ratios(cpu_s[_BARE], cpu_s["service"]),
                "ratio",
                "higher",
            )
        )
        rows += [
            Row.of(f"{name}, {label}", [num_tokens / s for s in durations_s[side]], unit, "higher")
            for label, side, unit in (
                ("service", "service", "tokens/s"),
                ("HF generate with PEFT adapter", _BARE, "tokens/s"),
            )
        ]
        return rows

    def _generate_s(self, *, is_merged: bool) -> float:
        answer: dict[str, Any] = self._bare.ask("generate", is_merged=is_merged)
        return float(answer["seconds"][0])

    # Clocks.

    def _take_turns(
        self, sides: dict[str, Callable[[], float]], num_repeats: int
    ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Call the sides in turns; return by side what they returned and their CPU time."""
        durations_s: dict[str, list[float]] = {side: [] for side in sides}
        cpu_s: dict[str, list[float]] = {side: [] for side in sides}
        for repeat in range(num_repeats):
            for side in sorted(sides, reverse=bool(repeat % 2)):
                is_bare = side in (_BARE, _BARE_MERGED)
                cpu_time_s = self._bare.cpu_time_s if is_bare else self._service.cpu_time_s
                begin_s = cpu_time_s()
                durations_s[side].append(sides[side]())
                cpu_s[side].append(cpu_time_s() - begin_s)
        return durations_s, cpu_s

    def _time_ms(self, call: Callable[[], object]) -> float:
        begin_s = time.perf_counter()
        call()
        return (time.perf_counter() - begin_s) * 1e3

    def _repeat(self, num_repeats: int, call: Callable[[], object]) -> list[float]:
        """Return the milliseconds of each call, after calls that are not counted."""
        for _ in range(_WARM_UP_CALLS):
            call()
        return [self._time_ms(call) for _ in range(num_repeats)]


def _folder_of(checkpoint: tinsmith.Checkpoint) -> Path:
    """Return the directory of a checkpoint, which PEFT can read."""
    return Path(checkpoint.manifest_uri.removeprefix("file://")).parent


def _ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def _latency_row(name: str, durations_ms: list[float], *, target: float) -> Row:
    """Return the median with the 5th and 95th percentile as the spread."""
    low, high = np.percentile(durations_ms, [5, 95])
    middle = [d for d in durations_ms if low <= d <= high]
    return Row.of(name, middle, "ms", "lower", target=target)


def _memory_row(side: str, when: str, size_bytes: int) -> Row:
    return Row.of(f"peak memory, {side}, {when}", [size_bytes / _MEBIBYTE], "MiB", "lower")


if __name__ == "__main__":
    sys.exit(main())
