"""What the gateway costs: `python -m bench.gateway`.

Each pod is a process of its own. The same gRPC calls go to the pods directly and through the
gateway, in turns; then requests of HTTP and gRPC as fast as they are answered, with the load
generator beside the gateway on the same cores; then a thousand long polls at once, while other
calls are timed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration
from rich.console import Console
from tests.support.memory import peak_mib
from tests.support.pods import PodDeployment

import tinsmith
from bench import report
from bench.concurrent_clients import make_datum
from bench.machine_load import process_cpu_s
from bench.tinker_overhead import tinker_rows
from tinsmith.tensors import decode_tensor, encode_tokens
from tinsmith.v1 import (
    sampler_pb2,
    sampler_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    trajectories_pb2,
)
from tinsmith_local.tiny_model import build_tiny_model

BASE_MODEL = "bench"
LIGHT_ENDPOINTS = ("/healthz", "/api/v1/get_server_capabilities", "/v1/models")
"""HTTP requests that cost little but their way: one without a key, one of each protocol."""

_CALLS, _REPEATS = 300, 5
_SUBMITS = 40
_SAMPLES, _SAMPLE_TOKENS = 16, 64
_CONNECTIONS, _LOAD_S = 64, 4.0
_POLL_S = 15
_TIMEOUT_S = 60.0
_console = Console(highlight=False, stderr=True)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the pods: their stubs."""

    scheduler: Any
    trainer: Any
    sampler: Any


@dataclass(frozen=True, slots=True)
class Work:
    """What calls are made on: two runs, one for each way, and a sampling session."""

    runs: tuple[tinsmith.TrainingRun, tinsmith.TrainingRun]
    trainer_address: str
    sampling_session: str
    sampler_address: str


def main() -> int:
    """Measure and write `bench/results/gateway.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--polls", type=int, default=1000, help="long polls held at once")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinsmith-gateway-") as name:
        folder = Path(name)
        model = build_tiny_model(folder / "model")
        names = ("scheduler", "trainer", "sampler", "gateway")
        with PodDeployment(folder / "pods", {BASE_MODEL: model}, names) as pods:
            with tinsmith.Client(pods.scheduler_address, pods.api_key) as client:
                work = _prepare(client, pods.api_key)
                rows = asyncio.run(_measure(pods, work, arguments.polls))
            rows += tinker_rows(pods, BASE_MODEL, arguments.polls)
    machine = report.machine() | {"threads": 1}
    report.write("gateway", rows, machine)
    report.show("Gateway", rows, machine)
    return 0


def _prepare(client: tinsmith.Client, key: str) -> Work:
    """Make what calls are made on, and find out where its pods are."""
    runs = (
        client.create_lora_training_run(BASE_MODEL, rank=1),
        client.create_lora_training_run(BASE_MODEL, rank=1),
    )
    sampler = client.create_sampler(base_model=BASE_MODEL)
    metadata = (("authorization", f"Bearer {key}"),)
    with grpc.insecure_channel(client.address) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        run = stub.GetTrainingRun(
            scheduler_pb2.GetTrainingRunRequest(name=runs[0].name), metadata=metadata
        )
        session = stub.GetSamplingSession(
            scheduler_pb2.GetSamplingSessionRequest(name=sampler.name), metadata=metadata
        )
    return Work(runs, run.trainer_address, sampler.name, session.sampler_addresses[0])


async def _measure(pods: PodDeployment, work: Work, num_polls: int) -> list[report.Row]:
    metadata = (("authorization", f"Bearer {pods.api_key}"),)
    async with (
        _way(pods.scheduler_address, work.trainer_address, work.sampler_address) as direct,
        _way(*(pods.gateway_address,) * 3) as through,
    ):
        caller = Caller(metadata, work)
        rows = await _latencies(
            "GetTrainingRun",
            lambda: caller.get_run(direct, _CALLS),
            lambda: caller.get_run(through, _CALLS),
        )
        rows += await _latencies(
            "minimal forward_backward, to its acknowledgement",
            lambda: caller.submit(direct, 0, _SUBMITS),
            lambda: caller.submit(through, 1, _SUBMITS),
        )
        rows += await _throughput(caller, direct, through)
        rows += await _loads(pods, caller, direct, through)
        rows += await _long_polls(pods, caller, through, num_polls)
    return rows


class Caller:
    """Makes the calls that are timed."""

    def __init__(self, metadata: Any, work: Work) -> None:
        self._metadata = metadata
        self._work = work
        self._numbers = (itertools.count(1), itertools.count(1))
        self._revisions = [0, 0]

    async def get_run(self, way: Way, num_calls: int) -> list[float]:
        """Ask for a run, again and again; return the seconds of each call."""
        request = scheduler_pb2.GetTrainingRunRequest(name=self._work.runs[0].name)
        return [
            await _timed(self.call(way.scheduler.GetTrainingRun, request)) for _ in range(num_calls)
        ]

    async def submit(self, way: Way, which: int, num_calls: int) -> list[float]:
        """Submit passes one after another; return the seconds to each acknowledgement."""
        run = self._work.runs[which].name
        seconds, last = [], 0
        for _ in range(num_calls):
            last = next(self._numbers[which])
            request = trainer_pb2.ForwardBackwardRequest(
                run=run,
                request_id=str(uuid.uuid4()),
                sequence_number=last,
                data=[make_datum()],
                loss=trainer_pb2.Loss(name="cross_entropy"),
            )
            seconds.append(await _timed(self.call(way.trainer.ForwardBackward, request)))
        await self._finish(way, which, last)
        return seconds

    async def sample(self, way: Way) -> float:
        """Draw samples beside each other; return tokens each second."""
        request = sampler_pb2.SampleRequest(
            sampling_session=self._work.sampling_session,
            num_samples=1,
            params=trajectories_pb2.SamplingParams(max_tokens=_SAMPLE_TOKENS, seed=1),
        )
        request.params.stop_tokens.SetInParent()
        request.prompt.chunks.add(tokens=encode_tokens(np.arange(5, 13)))
        begin_s = time.perf_counter()
        answers = await asyncio.gather(
            *(self.call(way.sampler.Sample, request) for _ in range(_SAMPLES))
        )
        num_tokens = sum(len(decode_tensor(answer.sequences[0].tokens)) for answer in answers)
        return num_tokens / (time.perf_counter() - begin_s)

    async def wait(self, way: Way) -> float:
        """Wait for an operation that is never sent; return the seconds until the server answers."""
        request = trainer_pb2.WaitOperationsRequest(
            run=self._work.runs[0].name,
            after_revision=self._revisions[0],
            timeout=Duration(seconds=_POLL_S),
        )
        return await _timed(self.call(way.trainer.WaitOperations, request))

    async def call(self, method: Any, request: Any) -> Any:
        """Make one call."""
        return await method(request, metadata=self._metadata, timeout=_TIMEOUT_S)

    async def _finish(self, way: Way, which: int, last: int) -> None:
        done = 0
        while done < last:
            request = trainer_pb2.WaitOperationsRequest(
                run=self._work.runs[which].name,
                after_revision=self._revisions[which],
                timeout=Duration(seconds=_POLL_S),
            )
            answer = await self.call(way.trainer.WaitOperations, request)
            numbers = [int(each.name.rpartition("/")[2]) for each in answer.operations]
            done = max([done, *numbers])
            self._revisions[which] = max(self._revisions[which], answer.revision)


async def _latencies(
    name: str,
    direct: Callable[[], Awaitable[list[float]]],
    through: Callable[[], Awaitable[list[float]]],
) -> list[report.Row]:
    """Time calls both ways in turns."""
    await direct(), await through()
    pairs = [(await direct(), await through()) for _ in range(_REPEATS)]
    rows = []
    for part, label in ((0.5, "p50"), (0.99, "p99")):
        times = [
            (1000 * _quantile(straight, part), 1000 * _quantile(by_gateway, part))
            for straight, by_gateway in pairs
        ]
        rows += [
            report.Row.of(f"{name}: {label}, direct", [one for one, _ in times], "ms", "lower"),
            report.Row.of("... through the gateway", [two for _, two in times], "ms", "lower"),
            report.Row.of("... added", [two - one for one, two in times], "ms", "lower"),
        ]
    _console.print(f"{name}: done")
    return rows


async def _throughput(caller: Caller, direct: Way, through: Way) -> list[report.Row]:
    await caller.sample(direct), await caller.sample(through)
    pairs = [(await caller.sample(direct), await caller.sample(through)) for _ in range(_REPEATS)]
    name = f"Sample, {_SAMPLES} x {_SAMPLE_TOKENS} tokens"
    return [
        report.Row.of(f"{name}: direct", [one for one, _ in pairs], "tokens/s", "higher"),
        report.Row.of("... through the gateway", [two for _, two in pairs], "tokens/s", "higher"),
        report.Row.of("... ratio", [two / one for one, two in pairs], "ratio", "higher"),
    ]


async def _loads(
    pods: PodDeployment, caller: Caller, direct: Way, through: Way
) -> list[report.Row]:
    """Requests as fast as they are answered, on connections that stay open."""
    rows = []
    for path in LIGHT_ENDPOINTS:
        rate = await _http_load(pods, path)
        if rate is None:
            _console.print(f"{path}: not served")
            continue
        rows.append(_row(f"HTTP {path}, {_CONNECTIONS} connections", rate, "1/s", "higher"))
    name = f"gRPC GetTrainingRun, {_CONNECTIONS} at once"
    straight = await _grpc_load(caller, direct)
    gateway = pods.processes["gateway"].pid
    before_s = process_cpu_s(gateway)
    by_gateway = await _grpc_load(caller, through)
    used_s = process_cpu_s(gateway) - before_s
    return [
        *rows,
        _row(f"{name}: direct", straight / _LOAD_S, "1/s", "higher"),
        _row("... through the gateway", by_gateway / _LOAD_S, "1/s", "higher"),
        _row("... CPU time of the gateway for each", 1000 * used_s / by_gateway, "ms", "lower"),
    ]


async def _grpc_load(caller: Caller, way: Way) -> int:
    """Return how many calls were answered."""
    num_calls, end_s = 0, time.perf_counter() + _LOAD_S

    async def ask() -> None:
        nonlocal num_calls
        while time.perf_counter() < end_s:
            await caller.get_run(way, 1)
            num_calls += 1

    await asyncio.gather(*(ask() for _ in range(_CONNECTIONS)))
    return num_calls


async def _http_load(pods: PodDeployment, path: str) -> float | None:
    """Return requests each second; None if the gateway does not have the path."""
    host, _, port = pods.gateway_address.rpartition(":")
    request = (f"GET {path} HTTP/1.1\r\nhost: {host}\r\nx-api-key: {pods.api_key}\r\n\r\n").encode()
    num_answers, end_s = 0, time.perf_counter() + _LOAD_S

    async def ask() -> bool:
        nonlocal num_answers
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            while time.perf_counter() < end_s:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    return False
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                num_answers += 1
        finally:
            writer.close()
        return True

    served = await asyncio.gather(*(ask() for _ in range(_CONNECTIONS)))
    return num_answers / _LOAD_S if all(served) else None


async def _long_polls(
    pods: PodDeployment, caller: Caller, through: Way, num_polls: int
) -> list[report.Row]:
    """Hold long polls, and time other calls meanwhile."""
    idle = await caller.get_run(through, _CALLS)
    polls = [asyncio.create_task(caller.wait(through)) for _ in range(num_polls)]
    await asyncio.sleep(_POLL_S / 3)
    busy = await caller.get_run(through, _CALLS)
    is_early = [poll.done() for poll in polls]
    results = await asyncio.gather(*polls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        _console.print(f"{len(errors)} long polls failed; the first: {errors[0]!r}")
    num_lost = sum(
        early or isinstance(result, BaseException)
        for early, result in zip(is_early, results, strict=True)
    )
    memory = peak_mib(pods.processes["gateway"].pid)
    name = f"{num_polls} long polls held"
    return [
        _row(f"{name}: failed or answered early", num_lost, "count", "lower", target=0),
        _row(f"{name}: GetTrainingRun p50", 1000 * _quantile(busy, 0.5), "ms", "lower"),
        _row("... without them", 1000 * _quantile(idle, 0.5), "ms", "lower"),
        _row(f"{name}: GetTrainingRun p99", 1000 * _quantile(busy, 0.99), "ms", "lower"),
        _row("... without them", 1000 * _quantile(idle, 0.99), "ms", "lower"),
        _row("peak memory of the gateway", memory, "MiB", "lower"),
    ]


@contextlib.asynccontextmanager
async def _way(scheduler: str, trainer: str, sampler: str) -> AsyncIterator[Way]:
    async with (
        grpc.aio.insecure_channel(scheduler) as to_scheduler,
        grpc.aio.insecure_channel(trainer) as to_trainer,
        grpc.aio.insecure_channel(sampler) as to_sampler,
    ):
        yield Way(
            scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler),
            trainer_pb2_grpc.TrainerServiceStub(to_trainer),
            sampler_pb2_grpc.SamplerServiceStub(to_sampler),
        )


async def _timed(call: Awaitable[Any]) -> float:
    begin_s = time.perf_counter()
    await call
    return time.perf_counter() - begin_s


def _quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)]


def _row(
    name: str, value: float, unit: str, better: report.Better, *, target: float | None = None
) -> report.Row:
    return report.Row.of(name, [value], unit, better, target=target)


if __name__ == "__main__":
    raise SystemExit(main())
