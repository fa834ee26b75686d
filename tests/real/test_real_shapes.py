"""Real families at their own widths, one layer deep: they start exact, and train as PEFT does.

Weights are random; widths, heads and vocabulary are the published ones. `make test-real` runs this.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tinsmith_engine import (
    AdamParams,
    BatchRequest,
    BatchResult,
    Datum,
    Engine,
    LoraConfig,
    Sampler,
    SampleRequest,
)
from tinsmith_local.random_model import build_random_model

SHAPES = ["smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b", "qwen2.5-1.5b"]
THREADS = (1, 2, 3, 4)
# Rank and sequence lengths of each tenant: stacked ones, ragged ones, one beyond short attention.
TENANTS = ((32, (48,)), (32, (40,)), (8, (7, 61)), (5, (20,)), (16, (300,)))
ADAM = AdamParams(learning_rate=1e-3, grad_clip_norm=0.5)
RELATIVE_TOLERANCE = {"float32": 2e-4, "bfloat16": 6e-2}
"""Of a gradient against PEFT's. In float32 sums have another order; in bfloat16 our norms and
adapters are rounded at other places than PEFT's, each by 1/256."""


class Case(NamedTuple):
    directory: Path
    dtype: str


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param((shape, dtype), id=f"{shape}-{dtype}")
            for shape in SHAPES
            for dtype in ("float32", "bfloat16")
        ),
        # Once, and in the dtype that fits.
        pytest.param(("qwen3-8b", "bfloat16"), id="qwen3-8b-bfloat16"),
    ],
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    shape, dtype = request.param
    directory = tmp_path_factory.mktemp("model")
    build_random_model(directory, shape, num_layers=1, dtype=dtype)
    yield Case(directory, dtype)
    (directory / "model.safetensors").unlink()


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine(case: Case) -> Engine:
    # What `tinsmith up` does by default, on two cores.
    engine = Engine.load(case.directory, dtype=case.dtype, num_threads=2, max_resident_runs=8)
    for index, (rank, _) in enumerate(TENANTS):
        run = f"tenant-{index}"
        engine.create_run(run, LoraConfig(rank=rank, seed=index))
        tensors, _ = engine.adapter_tensors(run)
        generator = torch.Generator().manual_seed(index)
        for name, tensor in tensors.items():
            if ".lora_B." in name:
                tensor.normal_(std=0.02, generator=generator)
        engine.load_adapter_tensors(run, tensors)
    return engine


def datum(engine: Engine, length: int, seed: int) -> Datum:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, engine.info.vocab_size, length + 1)
    weights = np.zeros(length, dtype=np.float32)
    # The head is most of the work at these vocabularies: some tokens of each sequence are enough.
    weights[-5:] = random.normal(size=min(5, length))
    return Datum(tokens[:-1], tokens[1:], {"weights": weights})


def requests(engine: Engine) -> list[BatchRequest]:
    return [
        BatchRequest(
            run=f"tenant-{index}",
            batch=[datum(engine, length, 10 * index + n) for n, length in enumerate(lengths)],
            loss="cross_entropy",
            loss_config={},
            is_backward=True,
        )
        for index, (_, lengths) in enumerate(TENANTS)
    ]


def step_bits(engine: Engine, asked: Sequence[BatchRequest]) -> dict[str, list[bytes]]:
    """Return what each run gets of a step: log-probabilities, gradient and weights."""
    before = {str(one.run): engine.export_state(str(one.run)) for one in asked}
    found: dict[str, list[bytes]] = {}
    for one, result in zip(asked, engine.compute(asked), strict=True):
        assert isinstance(result, BatchResult)
        run = str(one.run)
        found[run] = [logprobs.tobytes() for logprobs in result.logprobs]
        found[run].append(engine.export_state(run).tensors["grad"].numpy().tobytes())
    for run, state in before.items():
        engine.optim_step(run, ADAM)
        found[run].append(engine.export_state(run).tensors["theta"].numpy().tobytes())
        engine.import_state(run, state)
    return found


def test_it_starts_exact(engine: Engine) -> None:
    assert engine.info.exactness == "exact"
    assert "threads=" not in engine.info.fingerprint


def test_a_step_has_the_bits_of_each_tenant_alone_at_any_number_of_threads(engine: Engine) -> None:
    asked = requests(engine)
    torch.set_num_threads(1)
    alone = {run: bits for one in asked for run, bits in step_bits(engine, [one]).items()}
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        assert step_bits(engine, asked) == alone, f"{num_threads} threads"
    assert step_bits(engine, asked[::-2]).items() <= alone.items()


def test_a_sample_has_the_bits_that_it_has_alone_at_any_number_of_threads(engine: Engine) -> None:
    exported = engine.export("tenant-0")
    asked = [
        SampleRequest(
            prompt_tokens=range(3, 3 + length), max_tokens=3, seed=length, weights=weights
        )
        for length, weights in ((5, None), (18, exported), (70, exported))
    ]

    def sampled(chosen: Sequence[SampleRequest]) -> dict[int, tuple[list[int], bytes]]:
        sampler = Sampler(engine)
        ids = {sampler.add(one): one.seed for one in chosen}
        found = {}
        while sampler.has_work:
            for sequence in sampler.step():
                bits = (sequence.tokens, sequence.logprobs.tobytes())
                found[ids[sequence.request_id]] = bits
        return found

    torch.set_num_threads(1)
    alone = {seed: bits for one in asked for seed, bits in sampled([one]).items()}
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        assert sampled(asked) == alone, f"{num_threads} threads"


def test_a_gradient_is_that_of_peft(engine: Engine, case: Case) -> None:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    run, lengths = "tenant-2", TENANTS[2][1]
    tensors, config = engine.adapter_tensors(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base: Any = AutoModelForCausalLM.from_pretrained(
            case.directory, dtype=getattr(torch, case.dtype)
        )
        peft: Any = get_peft_model(
            base,
            PeftLoraConfig(
                r=config["r"],
                lora_alpha=config["lora_alpha"],
                target_modules=config["target_modules"],
            ),
        )
        set_peft_model_state_dict(peft, tensors)
    asked = next(one for one in requests(engine) if one.run == run)
    result = engine.compute([asked])[0]
    assert isinstance(result, BatchResult)
    ours = engine.export_state(run)
    engine.clear_gradient(run)
    for one, logprobs in zip(asked.batch, result.logprobs, strict=True):
        logits = peft(input_ids=torch.from_numpy(one.tokens_T)[None]).logits[0].float()
        theirs = torch.log_softmax(logits, dim=-1).gather(
            1, torch.from_numpy(one.targets_T)[:, None]
        )[:, 0]
        weights = torch.from_numpy(one.loss_inputs["weights"])
        (-(theirs * weights).sum()).backward()
        scored = weights != 0
        torch.testing.assert_close(
            torch.from_numpy(logprobs)[scored],
            theirs.detach()[scored],
            rtol=RELATIVE_TOLERANCE[case.dtype],
            atol=10 * RELATIVE_TOLERANCE[case.dtype],
        )
    assert len(lengths) == len(result.logprobs)
    gradient = ours.tensors["grad"]
    norm = torch.cat(
        [p.grad.float().flatten() for p in peft.parameters() if p.grad is not None]
    ).norm()
    assert float(gradient.norm()) == pytest.approx(
        float(norm), rel=10 * RELATIVE_TOLERANCE[case.dtype]
    )
    entries = engine._runs.get(run).layout.views(gradient)
    for name, parameter in peft.named_parameters():
        if parameter.grad is None:
            continue
        found = entries[name.removeprefix("base_model.model.").replace(".default", "")]
        difference = (found - parameter.grad.float()).norm() / norm
        assert float(difference) < RELATIVE_TOLERANCE[case.dtype], name
