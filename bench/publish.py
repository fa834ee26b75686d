"""How long new weights take to a sampler in another process: `python -m bench.publish`.

Trainer and sampler are two processes with one thread each. The sampler decodes 16 sequences all the
time. An export is what a request waits for after a step of its run: the question for the newest
weights, their way, their check, and the switch. Three ways take turns, each with a step before it:
memory of the machine that both map, the stream between machines (here over loopback), and the
object store, a folder. The 5 MB are an adapter of rank 32, the 1 GB all weights of a model.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
from rich.console import Console
from tests.support.pods import PodDeployment

import tinsmith
from bench import report
from tinsmith.rpc.channels import open_channel
from tinsmith.v1 import scheduler_pb2, scheduler_pb2_grpc
from tinsmith_engine import SampleRequest
from tinsmith_engine.host import EngineHost
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model
from tinsmith_runtime import storage
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engines.embedded_engine import EmbeddedEngines
from tinsmith_sampler.engines.engine_protocol import EngineListener, SamplingEngine, Ticket
from tinsmith_sampler.forms.trials import FormTrials
from tinsmith_sampler.requests.sessions import Target
from tinsmith_sampler.rpc.trainer_client import TrainerClient
from tinsmith_sampler.weights.trainer_protocol import (
    ExportedWeights,
    StoredWeights,
    WeightChunk,
    WeightDescription,
)
from tinsmith_sampler.weights.weight_source import WeightSource

BASE_MODEL = "bench"
NUM_SEQUENCES, DECODED_TOKENS = 16, 1500
_TARGET_MS = 10.0
_MODELS = {
    "5 MB": TinyModelConfig(
        hidden_size=384, num_layers=6, intermediate_size=1024, max_position_embeddings=2048
    ),
    "1 GB": TinyModelConfig(
        hidden_size=1024,
        num_layers=16,
        num_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=4096,
        max_position_embeddings=2048,
        initializer_range=0.03,
    ),
}
_console = Console(highlight=False, stderr=True)


class _Streamed(TrainerClient):
    """Reads as from another machine."""

    async def read(
        self, address: str, run: str, weights_id: str, *, offset: int, held: str, maps_memory: bool
    ) -> AsyncGenerator[WeightDescription | WeightChunk, None]:
        stream = super().read(
            address, run, weights_id, offset=offset, held=held, maps_memory=maps_memory and False
        )
        async for message in stream:
            yield message


class _Stored(TrainerClient):
    """Has weights written to the store, as an older trainer does."""

    async def newest(self, address: str, run: str) -> ExportedWeights | StoredWeights:
        return await self.export_to_store(address, run)


_WAYS: dict[str, type[TrainerClient]] = {
    "shared memory": TrainerClient,
    "stream": _Streamed,
    "store": _Stored,
}


def main() -> int:
    """Measure and write `bench/results/publish.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", choices=sorted(_MODELS), default=sorted(_MODELS))
    parser.add_argument("--repeats", type=int, default=60, help="exports of 5 MB by each way")
    parser.add_argument("--large-repeats", type=int, default=6, help="exports of 1 GB")
    arguments = parser.parse_args()
    rows: list[report.Row] = []
    for size in arguments.sizes:
        repeats = arguments.repeats if size == "5 MB" else arguments.large_repeats
        with tempfile.TemporaryDirectory(prefix="tinsmith-publish-") as name:
            rows += asyncio.run(_measure(Path(name), size, repeats))
    machine = report.machine() | {"threads": 1}
    report.write("publish", rows, machine)
    report.show("Publishing across processes", rows, machine)
    return 0


async def _measure(folder: Path, size: str, num_repeats: int) -> list[report.Row]:
    model = build_tiny_model(folder / "model", _MODELS[size])
    with PodDeployment(folder / "pods", {BASE_MODEL: model}, ("scheduler", "trainer")) as pods:
        host = await asyncio.to_thread(_load, model)
        config = SamplerConfig(
            storage_uri=pods.storage_uri,
            scheduler_address=pods.scheduler_address,
            base_models=f"{BASE_MODEL}={model}",
        )
        listener = EngineListener(lambda _: None, lambda: None)
        engine = EmbeddedEngines(host).engines(config, listener, FormTrials())[BASE_MODEL]
        decoding = [asyncio.create_task(_decode(engine, seed)) for seed in range(NUM_SEQUENCES)]
        try:
            with tinsmith.Client(pods.scheduler_address, pods.api_key) as client:
                run = await asyncio.to_thread(_new_run, client, size)
                target = await _target(pods, run.name)
                seconds = await _export(pods, engine, run, target, num_repeats)
        finally:
            for task in decoding:
                task.cancel()
            await asyncio.gather(*decoding, return_exceptions=True)
            host.thread.close(30.0)
    return _rows(size, seconds)


def _load(model: Path) -> EngineHost:
    return EngineHost.load(
        {BASE_MODEL: str(model)},
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_resident_runs=1,
    )


async def _decode(engine: SamplingEngine, seed: int) -> None:
    """Keep a sequence decoding."""
    while True:
        request = SampleRequest(
            prompt_tokens=[5, 6, 7, seed + 8], max_tokens=DECODED_TOKENS, seed=seed, cache_scope="p"
        )
        ticket = Ticket(request, None)
        await engine.submit(ticket)
        try:
            await asyncio.wrap_future(ticket.future)
        except asyncio.CancelledError:
            engine.cancel(ticket)
            raise


def _new_run(client: tinsmith.Client, size: str) -> tinsmith.TrainingRun:
    if size == "5 MB":
        return client.create_lora_training_run(BASE_MODEL, rank=32, seed=1)
    return client.create_full_training_run(BASE_MODEL)


async def _target(pods: PodDeployment, run: str) -> Target:
    channel = open_channel(pods.scheduler_address)
    try:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        found = await stub.GetTrainingRun(
            scheduler_pb2.GetTrainingRunRequest(name=run),
            metadata=(("authorization", f"Bearer {pods.api_key}"),),
            timeout=30,
        )
    finally:
        await channel.close()
    return Target(BASE_MODEL, "", run, found.trainer_address, run.split("/")[1])


async def _export(
    pods: PodDeployment,
    engine: SamplingEngine,
    run: tinsmith.TrainingRun,
    target: Target,
    num_repeats: int,
) -> dict[str, list[float]]:
    """Return the seconds of exports by each way."""
    credentials = PodCredentials.read(pods.pod_key, PodRole.SAMPLER)
    clients = {way: make(credentials) for way, make in _WAYS.items()}
    sources = {
        way: WeightSource(
            {BASE_MODEL: engine},
            storage.open(pods.storage_uri),
            client,
            max_loaded=1,
            export_live=None,
        )
        for way, client in clients.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    for repeat in range(num_repeats + 1):
        for way, source in sources.items():
            version = await asyncio.to_thread(_step, run, repeat)
            begin_s = time.perf_counter()
            handle = await source.get(target, min_version=version)
            elapsed_s = time.perf_counter() - begin_s
            if handle is None or handle.version != version:
                raise RuntimeError(f"not version {version} by {way}: {handle}")
            # The first one opens connections.
            if repeat:
                seconds[way].append(elapsed_s)
                _console.print(f"{way}: {1e3 * elapsed_s:.1f} ms")
            await engine.unload(handle.run)
    for client in clients.values():
        await client.close()
    return seconds


def _step(run: tinsmith.TrainingRun, seed: int) -> int:
    tokens = np.random.default_rng(seed).integers(3, 200, 9)
    inputs: dict[str, np.ndarray] = {
        "target_tokens": tokens[1:],
        "weights": np.ones(8, np.float32),
    }
    datum = tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1].tolist()), inputs)
    run.forward_backward([datum], "cross_entropy")
    return run.optim_step(tinsmith.AdamParams(learning_rate=1e-4)).result().version


def _rows(size: str, seconds: dict[str, list[float]]) -> list[report.Row]:
    rows = []
    for way, found in seconds.items():
        milliseconds = [1e3 * each for each in found]
        name = f"{size} by {way}, {NUM_SEQUENCES} sequences decoding"
        rows.append(report.Row.of(f"{name}: p50 of {len(found)}", milliseconds, "ms", "lower"))
        is_held = size == "5 MB" and way != "store"
        rows.append(
            report.Row.of(
                "... p95",
                [float(np.percentile(milliseconds, 95))],
                "ms",
                "lower",
                target=_TARGET_MS if is_held else None,
            )
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
