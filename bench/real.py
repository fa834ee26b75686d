"""A real shape in full depth, as users run it, beside what they would write without us.

`python -m bench.real` makes the 0.5 B model of `tinsmith models build-random qwen2.5-0.5b` and
starts `tinsmith up` on it with its defaults. Training and sampling go through the SDK from this
process, on the same cores. The rivals run here: transformers + PEFT for training, its `generate`
and a plain loop over a preallocated cache (`static_loop.py`) for decoding. Sides take turns, and a
figure is the median of the ratios of neighbouring turns. All sides have all cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from tests.support.memory import peak_mib

import tinsmith
from bench import report
from bench.paired_runs import Batch, Case, EngineSide, PeftSide, ratios
from bench.static_loop import StaticLoop, generate
from tinsmith_engine.base.memory import keep_freed_memory
from tinsmith_engine.model.lm_head import chunk_rows
from tinsmith_local.process import ServerProcess
from tinsmith_local.random_model import build_random_model

SHAPE, RANK = "qwen2.5-0.5b", 32
START_SHAPES = ("smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b", "qwen2.5-1.5b")
TENANTS = 4
PROMPT_TOKENS, SAMPLED_TOKENS = 16, 24
_ADAM = tinsmith.AdamParams(learning_rate=1e-4)


class Rivals(PeftSide):
    """One copy of the weights for PEFT and `generate`, and one for the static loop."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, torch.float32, TENANTS, rank=RANK, fused=True)
        self._loops = {
            count: StaticLoop(
                model_dir, num_sequences=count, max_tokens=PROMPT_TOKENS + SAMPLED_TOKENS
            )
            for count in (1, 8)
        }

    def generate(self, prompts: torch.Tensor) -> None:
        """Sample with transformers' `generate`, without adapters."""
        self.model.eval()
        with self.model.disable_adapter():
            generate(self.model, prompts, SAMPLED_TOKENS)
        self.model.train()

    def loop(self, prompts: torch.Tensor) -> None:
        """Sample with the static loop."""
        self._loops[len(prompts)].generate(prompts, SAMPLED_TOKENS)


class Service:
    """What a user of the SDK would write."""

    def __init__(self, client: tinsmith.Client, model: str) -> None:
        self._runs = [
            client.create_lora_training_run(model, rank=RANK, seed=n) for n in range(TENANTS)
        ]
        self._sampler = client.create_sampler(base_model=model)

    def train(self, batches: list[Batch]) -> None:
        """Take a step for each tenant, all of them submitted before the first is awaited."""
        futures: list[Any] = []
        for run, batch in zip(self._runs, batches, strict=False):
            data = [
                tinsmith.Datum(
                    tinsmith.ModelInput.from_ints(row[:-1]),
                    {"target_tokens": row[1:], "weights": np.ones(len(row) - 1)},
                )
                for row in batch
            ]
            futures += [run.forward_backward(data, "cross_entropy"), run.optim_step(_ADAM)]
        for future in futures:
            future.result()

    def sample(self, prompts: torch.Tensor) -> None:
        """Sample one prompt as often as there are prompts, as RL does."""
        params = tinsmith.SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=0.0, stop=[])
        result = self._sampler.sample(prompts[0].tolist(), len(prompts), params).result()
        if any(len(one.tokens) != SAMPLED_TOKENS for one in result.sequences):
            raise RuntimeError("a completion ended early")


def service_rows(model_dir: Path, folder: Path, repeats: int) -> list[report.Row]:
    """Compare the service with its rivals, and look at its memory."""
    random = np.random.default_rng(0)

    def tokens(num_sequences: int, length: int) -> torch.Tensor:
        return torch.from_numpy(random.integers(3, 150_000, (num_sequences, length)))

    weights_bytes = (model_dir / "model.safetensors").stat().st_size
    begin_s = time.perf_counter()
    with ServerProcess(folder, {"bench": model_dir}, num_threads=os.cpu_count() or 1) as server:
        start_s = time.perf_counter() - begin_s
        started_bytes = peak_mib(server.pid) * 2**20
        rows = [report.Row.of("start of tinsmith up", [start_s], "s", "lower")]
        with tinsmith.Client(server.address, server.api_key) as client:
            service, rivals = Service(client, "bench"), Rivals(model_dir)
            for name, batches, target in (
                ("training 1 tenant x (4x128): service / PEFT", [tokens(4, 129).tolist()], 1.0),
                (
                    "training 4 tenants x (1x64): service / PEFT in turn",
                    [tokens(1, 65).tolist() for _ in range(TENANTS)],
                    1.6,
                ),
            ):
                found, best_s = ratios(
                    lambda: service.train(batches),  # noqa: B023 - called before the next round
                    lambda: rivals.step(batches),  # noqa: B023
                    repeats,
                )
                count = sum(len(row) - 1 for batch in batches for row in batch)
                rows.append(report.Row.of(name, found, "ratio", "higher", target=target))
                rows.append(speed(name, count / best_s))
            for count in (1, 8):
                prompts = tokens(1, PROMPT_TOKENS).expand(count, -1)
                for rival, theirs, target in (
                    ("static loop", rivals.loop, 0.85),
                    ("HF generate", rivals.generate, 1.0),
                ):
                    name = f"decoding {count} sequence(s): service / {rival}"
                    found, best_s = ratios(
                        lambda: service.sample(prompts),  # noqa: B023
                        lambda: theirs(prompts),  # noqa: B023
                        repeats,
                    )
                    rows.append(report.Row.of(name, found, "ratio", "higher", target=target))
                rows.append(speed(name, count * SAMPLED_TOKENS / best_s))
        used_bytes = peak_mib(server.pid) * 2**20
    needed = known_bytes(model_dir)
    rows += [
        report.Row.of(
            "peak memory after the start / weights",
            [started_bytes / weights_bytes],
            "ratio",
            "lower",
            target=1.3,
        ),
        report.Row.of(
            "peak memory at the end, less adapters, cache and activations / weights",
            [(used_bytes - sum(needed.values())) / weights_bytes],
            "ratio",
            "lower",
            target=1.3,
        ),
        report.Row.of("peak memory at the end", [used_bytes / 2**30], "GiB", "lower"),
        *(
            report.Row.of(f"of that: {name}", [size / 2**30], "GiB", "lower")
            for name, size in needed.items()
        ),
    ]
    return rows


def speed(name: str, tokens_per_s: float) -> report.Row:
    """Return our own speed as a row that explains a ratio."""
    return report.Row.of(f"{name.split(':')[0]}: service", [tokens_per_s], "tokens/s", "higher")


def known_bytes(model_dir: Path) -> dict[str, float]:
    """Return what adapters, the cache, and activations and logits of 4 x 128 tokens take."""
    config = json.loads((model_dir / "config.json").read_text())
    layers, hidden, inner = (
        config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    linears = 2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + inner)
    # Of each token and layer: x, normed, qkv, turned q and k, attended, middle, normed, gate and
    # up; one LoRA projection for each linear layer; q, k, v and probabilities of attention.
    activations = 5 * hidden + 2 * (hidden + keys) + keys + 2 * inner + 7 * RANK
    activations += hidden + 2 * keys + 128 * config["num_attention_heads"]
    return {
        "adapters, gradients and moments": 4.0 * 4 * TENANTS * layers * RANK * linears,
        "keys and values": 4.0 * 2 * layers * keys * 64 * 64,
        "activations of 512 tokens": 4.0 * 512 * layers * activations,
        "logits of a chunk of the head": 4.0
        * chunk_rows(config["vocab_size"])
        * config["vocab_size"],
    }


def start_rows(folder: Path) -> list[report.Row]:
    """Start the server on each shape, two layers deep, train a step and sample."""
    rows = []
    for shape in START_SHAPES:
        model_dir = build_random_model(folder / shape, shape, num_layers=2)
        for num_threads in (1, 2, 4):
            begin_s = time.perf_counter()
            place = folder / f"{shape}-{num_threads}"
            with ServerProcess(place, {"bench": model_dir}, num_threads=num_threads) as server:
                start_s = time.perf_counter() - begin_s
                with tinsmith.Client(server.address, server.api_key) as client:
                    exactness = client.list_models()[0].exactness
                    service = Service(client, "bench")
                    service.train([[list(range(3, 36))]])
                    service.sample(torch.arange(3, 3 + PROMPT_TOKENS)[None])
            name = f"{shape}, 2 layers, {num_threads} thread(s), {exactness}: start of tinsmith up"
            rows.append(report.Row.of(name, [start_s], "s", "lower"))
        (model_dir / "model.safetensors").unlink()
    return rows


def exactness_rows(model_dir: Path, repeats: int) -> list[report.Row]:
    """Compare the exact mode with the fastest one, at many rows and at few."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        exact, fast = (
            EngineSide(model_dir, dtype, 1, exact=is_exact, num_threads=None, rank=RANK)
            for is_exact in (True, False)
        )
        for lengths in ((128,) * 8, (8,)):
            batches = Case("", 1, lengths, {}).batches()
            found, _ = ratios(
                lambda: fast.step(batches),  # noqa: B023 - called before the next round
                lambda: exact.step(batches),  # noqa: B023
                repeats,
            )
            name = f"{sum(lengths)} rows, {dtype}: exact / fastest mode, time of a step"
            rows.append(report.Row.of(name, found, "ratio", "lower", target=1.10))
    return rows


def main() -> None:
    """Run all and write `bench/results/real.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", type=Path, help="directory of the 0.5 B model, if it is there")
    parser.add_argument("--only", choices=["service", "exactness", "starts"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if psutil.virtual_memory().available < 16 * 2**30:
        sys.exit("bench.real needs 16 GB of free memory: it holds the model five times")
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir = arguments.model or build_random_model(folder / "model", SHAPE)
        rows = []
        if arguments.only in (None, "service"):
            rows += service_rows(model_dir, folder / "server", arguments.repeats)
        if arguments.only in (None, "exactness"):
            rows += exactness_rows(model_dir, arguments.repeats)
        if arguments.only in (None, "starts"):
            rows += start_rows(folder)
    machine = report.machine() | {"torch": torch.__version__, "threads": os.cpu_count() or 1}
    report.show("A 0.5 B shape in full depth, with the defaults", rows, machine)
    if arguments.only is None:
        report.write("real", rows, machine)


if __name__ == "__main__":
    main()
