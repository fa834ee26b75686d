"""The embedded engine's sampling beside a bare decode loop and `generate`, in one process.

`python -m bench.sampler` decodes with two models of random weights. `small` is a Qwen3 with hidden
256 and four layers, where calls cost more than arithmetic. The other is SmolLM2-135M in full
depth. Ours samples at temperature 1 with log-probabilities, and with the default settings. The loop
of `static_loop.py` and `generate` take the likeliest token and report nothing. Sides take turns,
and a figure is the median of the ratios of neighbouring turns. All sides have two threads.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import report
from bench.paired_runs import build_model, ratios
from bench.static_loop import StaticLoop, generate
from tinsmith_engine import Engine, LoraConfig, Sampler, SampleRequest, WeightVersion
from tinsmith_engine.base.memory import keep_freed_memory
from tinsmith_local.random_model import build_random_model

SHAPE, VOCAB = "smollm2-135m", 1024
NUM_THREADS, RANK, NUM_ADAPTERS = 2, 32, 16
PROMPT_TOKENS = 16
LONG_PROMPT = 32_768
TURN_TOKENS, NUM_TURNS = 100, 10
"""Of a rollout: tokens that a turn adds to the prompt, half of them sampled."""


class Ours:
    """The engine and its sampler with the defaults."""

    def __init__(self, model_dir: Path, **options: Any) -> None:
        self.engine = Engine.load(model_dir, num_threads=NUM_THREADS, **options)
        self._vocab_size = self.engine.info.vocab_size
        self._sampler = Sampler(self.engine)
        self._random = np.random.default_rng(0)
        self.step_seconds: list[float] = []

    def adapters(self, count: int) -> list[WeightVersion]:
        """Return versions of new runs."""
        found = []
        for index in range(count):
            self.engine.create_run(f"run-{index}", LoraConfig(rank=RANK, seed=index))
            found.append(self.engine.export(f"run-{index}"))
        return found

    def prompt(self, num_tokens: int = PROMPT_TOKENS) -> list[int]:
        """Return tokens that no prompt had before."""
        found: list[int] = self._random.integers(3, self._vocab_size, num_tokens).tolist()
        return found

    def sample(
        self,
        num_prompts: int,
        num_samples: int,
        num_tokens: int,
        *,
        weights: Sequence[WeightVersion | None] = (None,),
        prompts: Sequence[list[int]] = (),
    ) -> None:
        """Sample new prompts, or given ones, to the end; prompt i with weights i."""
        given = prompts or [self.prompt() for _ in range(num_prompts)]
        for index, prompt in enumerate(given):
            request = SampleRequest(
                prompt_tokens=prompt,
                max_tokens=num_tokens,
                num_samples=num_samples,
                weights=weights[index % len(weights)],
                seed=index,
            )
            self._sampler.add(request)
        self.finish()

    def finish(self) -> None:
        """Step until nothing is left, and note what each step took."""
        self.step_seconds = []
        while self._sampler.has_work:
            begin_s = time.perf_counter()
            self._sampler.step()
            self.step_seconds.append(time.perf_counter() - begin_s)

    def rollout(self, *, knows_beginnings: bool = True) -> None:
        """Sample the turns of a conversation, each behind all that was said before."""
        prompt: list[int] = []
        for turn in range(NUM_TURNS):
            prompt += self.prompt(TURN_TOKENS // 2)
            self._sampler.add(
                SampleRequest(
                    prompt_tokens=list(prompt),
                    max_tokens=TURN_TOKENS // 2,
                    # What one scope has read is not known to another.
                    cache_scope="" if knows_beginnings else f"turn-{turn}",
                )
            )
            while self._sampler.has_work:
                for one in self._sampler.step():
                    prompt += one.tokens

    def beside_a_long_prompt(self) -> tuple[float, float]:
        """Return the p99 of the steps of 16 sequences, alone and while a long prompt is read."""
        for index in range(16):
            self._sampler.add(
                SampleRequest(prompt_tokens=self.prompt(), max_tokens=200, seed=index)
            )
        alone = []
        for _ in range(100):
            begin_s = time.perf_counter()
            self._sampler.step()
            alone.append(time.perf_counter() - begin_s)
        length = min(LONG_PROMPT, self._sampler.max_sequence_tokens - 1)
        self._sampler.add(SampleRequest(prompt_tokens=self.prompt(length), max_tokens=1))
        beside, num_left = [], 16
        while num_left:
            begin_s = time.perf_counter()
            ended = self._sampler.step()
            beside.append(time.perf_counter() - begin_s)
            num_left -= sum(one.finish_reason == "length" and bool(one.tokens[1:]) for one in ended)
        self.finish()
        return float(np.quantile(alone[1:], 0.99)), float(np.quantile(beside, 0.99))


def decode_rows(
    name: str, model_dir: Path, ours: Ours, num_tokens: int, repeats: int
) -> list[report.Row]:
    """Compare decoding by itself with its rivals."""
    from transformers import AutoModelForCausalLM

    rows = []
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    for count, target in ((1, 0.8), (16, 0.9), (64, 0.9)):
        loop = StaticLoop(model_dir, num_sequences=count, max_tokens=PROMPT_TOKENS + num_tokens)
        prompts = torch.ones(count, PROMPT_TOKENS, dtype=torch.int64)
        for rival, call, wanted in (
            ("static loop", lambda: loop.generate(prompts, num_tokens), target),  # noqa: B023
            ("HF generate", lambda: generate(model, prompts, num_tokens), None),  # noqa: B023
        ):
            found, best_s = ratios(
                lambda: ours.sample(1, count, num_tokens),  # noqa: B023
                call,
                repeats,
            )
            title = f"{name}, {count} sequence(s): engine / {rival}"
            rows.append(report.Row.of(title, found, "ratio", "higher", target=wanted))
        speed = count * num_tokens / best_s
        title = f"{name}, {count} sequence(s): engine"
        rows.append(report.Row.of(title, [speed], "tokens/s", "higher"))
    return rows


def sharing_rows(name: str, ours: Ours, num_tokens: int, repeats: int) -> list[report.Row]:
    """Compare many prompts with one, and many adapters with one."""
    found, _ = ratios(
        lambda: ours.sample(64, 1, num_tokens), lambda: ours.sample(1, 64, num_tokens), repeats
    )
    title = f"{name}: 64 prompts x 1 / 1 prompt x 64"
    rows = [report.Row.of(title, found, "ratio", "higher", target=0.8)]
    adapters = ours.adapters(NUM_ADAPTERS)
    found, _ = ratios(
        lambda: ours.sample(16, 1, num_tokens, weights=adapters),
        lambda: ours.sample(16, 1, num_tokens, weights=adapters[:1]),
        repeats,
    )
    title = f"{name}: 16 adapters / one, 16 prompts x 1"
    return [*rows, report.Row.of(title, found, "ratio", "higher", target=0.85)]


def latency_rows(name: str, ours: Ours, repeats: int) -> list[report.Row]:
    """Measure the first token, and how evenly tokens come."""
    first, tails = [], []
    for _ in range(max(repeats, 3)):
        for _ in range(5):
            ours.sample(1, 1, 1)
            first.append(1e3 * sum(ours.step_seconds))
        ours.sample(1, 16, 96)
        times = ours.step_seconds[1:]
        tails.append(float(np.quantile(times, 0.95) / np.quantile(times, 0.5)))
    return [
        report.Row.of(f"{name}: first token", first, "ms", "lower", target=15.0),
        report.Row.of(
            f"{name}, 16 sequences: p95 / p50 of a token", tails, "ratio", "lower", target=2.0
        ),
    ]


def prompt_rows(name: str, ours: Ours, repeats: int) -> list[report.Row]:
    """Measure a rollout of turns, and a long prompt beside short ones."""
    found, best_s = ratios(ours.rollout, lambda: ours.rollout(knows_beginnings=False), repeats)
    pairs = [ours.beside_a_long_prompt() for _ in range(2)]
    return [
        report.Row.of(
            f"{name}: rollout of {NUM_TURNS} turns with / without reuse of what was read",
            found,
            "ratio",
            "higher",
        ),
        report.Row.of(f"{name}: rollout of {NUM_TURNS} turns", [best_s], "s", "lower"),
        report.Row.of(
            f"{name}, 16 sequences: p99 of a token beside a prompt as long as the context / alone",
            [beside / alone for alone, beside in pairs],
            "ratio",
            "lower",
            target=2.0,
        ),
    ]


def exactness_rows(
    name: str, model_dir: Path, ours: Ours, num_tokens: int, repeats: int
) -> list[report.Row]:
    """Compare the exact profile with the fastest mode."""
    fast = Ours(model_dir, exact=False)
    rows = []
    for count in (1, 16):
        found, _ = ratios(
            lambda: fast.sample(1, count, num_tokens),  # noqa: B023
            lambda: ours.sample(1, count, num_tokens),  # noqa: B023
            repeats,
        )
        title = f"{name}, {count} sequence(s): time of the exact profile / fastest mode"
        rows.append(report.Row.of(title, found, "ratio", "lower", target=1.15))
    return rows


def model_rows(
    name: str, model_dir: Path, num_tokens: int, repeats: int
) -> Iterator[list[report.Row]]:
    """Yield the rows of a model, as soon as some are measured."""
    ours = Ours(model_dir)
    yield decode_rows(name, model_dir, ours, num_tokens, repeats)
    yield sharing_rows(name, ours, num_tokens, repeats)
    yield latency_rows(name, ours, repeats)
    yield exactness_rows(name, model_dir, ours, num_tokens, repeats)
    yield prompt_rows(name, ours, repeats)


def main() -> None:
    """Run all and write `bench/results/sampler.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["small", "wide"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    keep_freed_memory()
    torch.set_num_threads(NUM_THREADS)
    rows: list[report.Row] = []
    machine = report.machine() | {
        "torch": torch.__version__,
        "threads": NUM_THREADS,
        "load": round(os.getloadavg()[0], 2),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for group in all_rows(folder, arguments.only, arguments.repeats):
            # A run that is cut off leaves what it has measured.
            report.show("Sampling in the engine", group, machine)
            rows += group
            if arguments.only is None:
                report.write("sampler", rows, machine)


def all_rows(folder: Path, only: str | None, repeats: int) -> Iterator[list[report.Row]]:
    """Yield the rows of the models that are asked for."""
    if only in (None, "small"):
        small = folder / "small"
        build_model(small, vocab_size=VOCAB, max_context_tokens=LONG_PROMPT + 1)
        yield from model_rows("small", small, 64, repeats)
    if only in (None, "wide"):
        wide = build_random_model(folder / "wide", SHAPE)
        yield from model_rows(SHAPE, wide, 32, repeats)


if __name__ == "__main__":
    main()
