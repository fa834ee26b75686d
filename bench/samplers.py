"""What a second sampler is worth to one sampling session: `python -m bench.samplers`.

The same prompts are sampled through the SDK in two deployments, in turns: one has two sampler
processes, the other one, and each process has one thread. A machine with two cores has none left
for the client, so that the ratio stays below two.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from pathlib import Path

from rich.console import Console
from tests.support.pods import PodDeployment
from tests.support.wait import until

import tinsmith
from bench import report
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model

BASE_MODEL = "bench"
_NUM_PROMPTS, _PROMPT_TOKENS, _SAMPLE_TOKENS = 256, 16, 48
_TARGET = 1.7
_PODS = ("scheduler", "trainer", "sampler")
_console = Console(highlight=False, stderr=True)


def main() -> int:
    """Measure and write `bench/results/samplers.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of measurements")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinsmith-samplers-") as name:
        folder = Path(name)
        config = TinyModelConfig(hidden_size=384, num_layers=6, intermediate_size=1024)
        model = build_tiny_model(folder / "model", config)
        with (
            PodDeployment(folder / "one", {BASE_MODEL: model}, _PODS) as one,
            PodDeployment(folder / "two", {BASE_MODEL: model}, (*_PODS, "sampler-1")) as two,
        ):
            rows = _measure(one, two, arguments.repeats)
    machine = report.machine() | {"threads": 1}
    report.write("samplers", rows, machine)
    report.show("Samplers", rows, machine)
    return 0


def _measure(one: PodDeployment, two: PodDeployment, num_repeats: int) -> list[report.Row]:
    with (
        tinsmith.Client(one.scheduler_address, one.api_key) as client_of_one,
        tinsmith.Client(two.scheduler_address, two.api_key) as client_of_two,
    ):
        samplers = [
            client.create_sampler(base_model=BASE_MODEL)
            for client in (client_of_one, client_of_two)
        ]
        for sampler, num_samplers in zip(samplers, (1, 2), strict=True):
            until(functools.partial(_reaches, sampler, num_samplers))
        pairs = []
        for repeat in range(num_repeats):
            rates = [_rate(sampler, seed=repeat + 1)[0] for sampler in samplers]
            pairs.append((rates[0], rates[1]))
            _console.print(f"1: {rates[0]:.0f}, 2: {rates[1]:.0f} tokens/s")
    name = f"one session, {_NUM_PROMPTS} prompts x {_SAMPLE_TOKENS} tokens"
    return [
        report.Row.of(f"{name}: 1 sampler", [single for single, _ in pairs], "tokens/s", "higher"),
        report.Row.of("... 2 samplers", [both for _, both in pairs], "tokens/s", "higher"),
        report.Row.of(
            "one session over 2 sampler processes / 1",
            [both / single for single, both in pairs],
            "ratio",
            "higher",
            target=_TARGET,
        ),
    ]


def _reaches(sampler: tinsmith.Sampler, num_samplers: int) -> bool:
    """Sample, and return whether so many samplers answered."""
    return len(_rate(sampler, seed=0)[1]) >= num_samplers


def _rate(sampler: tinsmith.Sampler, seed: int) -> tuple[float, set[str]]:
    """Sample all prompts at once; return tokens each second, and the samplers that answered."""
    # Prompts of each round are new: nothing of them is known.
    prompts = [
        [(seed * 31 + index * 7 + position) % 200 + 1 for position in range(_PROMPT_TOKENS)]
        for index in range(_NUM_PROMPTS)
    ]
    begin_s = time.perf_counter()
    futures = [
        sampler.sample(
            prompt,
            sampling_params=tinsmith.SamplingParams(max_tokens=_SAMPLE_TOKENS, seed=1, stop=[]),
        )
        for prompt in prompts
    ]
    answers = [future.result() for future in futures]
    num_tokens = sum(len(answer.sequences[0].tokens) for answer in answers)
    return num_tokens / (time.perf_counter() - begin_s), {answer.sampler for answer in answers}


if __name__ == "__main__":
    raise SystemExit(main())
