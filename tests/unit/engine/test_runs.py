"""Life of a run: accumulation, state in and out, faults, and neighbours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.conftest import LORA, make_batch, randomise_b, relative_error, save_tiny

from tinsmith_engine import (
    AdamParams,
    AdapterConfig,
    BatchRequest,
    BatchResult,
    Datum,
    Engine,
    FullConfig,
    LoraConfig,
    OptimStepResult,
)
from tinsmith_runtime.errors import (
    AlreadyExistsError,
    CapacityExhaustedError,
    CheckpointIncompatibleError,
    InternalError,
    InvalidFieldError,
    ModelNotFoundError,
    NoGradientError,
    NonFiniteLossError,
    RunNotFoundError,
    TokenOutOfVocabularyError,
)

CONFIGS = [pytest.param(LORA, id="lora"), pytest.param(FullConfig(), id="full")]


def assert_same_state(engine: Engine, left: str, right: str) -> None:
    a, b = engine.export_state(left), engine.export_state(right)
    assert (a.version, a.has_gradient, a.adam_steps) == (b.version, b.has_gradient, b.adam_steps)
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        assert torch.equal(a.tensors[name], b.tensors[name]), name


def train(engine: Engine, run: str, seeds: range) -> None:
    for seed in seeds:
        engine.forward_backward(run, make_batch(seed=seed), "cross_entropy", {})
        engine.optim_step(run, AdamParams(learning_rate=1e-2, weight_decay=0.1))


def overflowing_batch() -> list[Datum]:
    """exp(lp - q) overflows: every input is finite, the loss is not."""
    batch = make_batch("importance_sampling", lengths=(6,))
    batch[0].loss_inputs["logprobs"][:] = -1e5
    return batch


@pytest.mark.parametrize("config", CONFIGS)
def test_two_half_batches_equal_one_batch(engine: Engine, config: AdapterConfig) -> None:
    batch = make_batch(lengths=(9, 30, 12, 21))
    adam = AdamParams(learning_rate=1e-2, eps=1e-3)
    for run, parts in (("whole", [batch]), ("halves", [batch[:2], batch[2:]])):
        engine.create_run(run, config)
        for part in parts:
            engine.forward_backward(run, part, "cross_entropy", {})
    # Sums of the same numbers in another order: a few units in the last place of float32.
    whole, halves = engine.export_state("whole"), engine.export_state("halves")
    assert relative_error(halves.tensors["grad"], whole.tensors["grad"]) < 1e-6
    for run in ("whole", "halves"):
        engine.optim_step(run, adam)
    whole, halves = engine.export_state("whole"), engine.export_state("halves")
    for name in ("theta", "m", "v"):
        assert relative_error(halves.tensors[name], whole.tensors[name]) < 1e-6


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_export_and_import_resume_with_equal_bits(
    tmp_path: Path, family: str, config: AdapterConfig
) -> None:
    engine = Engine.load(save_tiny(tmp_path, family))
    engine.create_run("a", config)
    train(engine, "a", range(2))
    engine.forward_backward("a", make_batch(seed=7), "cross_entropy", {})
    state = engine.export_state("a")
    fresh = Engine.load(tmp_path)
    fresh.import_state("b", state)
    for target, run in ((engine, "a"), (fresh, "b")):
        target.optim_step(run, AdamParams())
        train(target, run, range(2, 4))
    engine.import_state("b", fresh.export_state("b"))
    assert_same_state(engine, "a", "b")


def test_a_neighbour_changes_no_bit(qwen3_dir: Path) -> None:
    alone, shared = Engine.load(qwen3_dir), Engine.load(qwen3_dir)
    shared.create_run("neighbour", LoraConfig(rank=8, seed=5))
    for engine in (alone, shared):
        engine.create_run("run", LORA)
    for step in range(2):
        shared.forward_backward("neighbour", make_batch(seed=50 + step), "cross_entropy", {})
        train(alone, "run", range(step, step + 1))
        train(shared, "run", range(step, step + 1))
        shared.optim_step("neighbour", AdamParams(weight_decay=0.5))
    shared.import_state("alone", alone.export_state("run"))
    assert_same_state(shared, "alone", "run")


@pytest.mark.parametrize("with_gradient", [False, True], ids=["clean", "gradient-pending"])
def test_non_finite_loss_leaves_the_run_untouched(engine: Engine, with_gradient: bool) -> None:
    engine.create_run("run", LORA)
    randomise_b(engine, "run")
    if with_gradient:
        engine.forward_backward("run", make_batch(), "cross_entropy", {})
    engine.import_state("before", engine.export_state("run"))
    with pytest.raises(NonFiniteLossError):
        engine.forward_backward("run", overflowing_batch(), "importance_sampling", {})
    assert_same_state(engine, "before", "run")


@pytest.mark.parametrize(
    "adam",
    [
        pytest.param(AdamParams(learning_rate=1e39), id="update-overflows"),
        pytest.param(AdamParams(learning_rate=1e38, weight_decay=1e38), id="decay-overflows"),
    ],
)
def test_non_finite_update_changes_no_weight_and_clears_the_gradient(
    engine: Engine, adam: AdamParams
) -> None:
    engine.create_run("run", LORA)
    train(engine, "run", range(1))
    engine.import_state("before", engine.export_state("run"))
    engine.forward_backward("run", make_batch(), "cross_entropy", {})
    with pytest.raises(NonFiniteLossError):
        engine.optim_step("run", adam)
    assert_same_state(engine, "before", "run")
    with pytest.raises(NoGradientError):
        engine.optim_step("run", AdamParams())


def test_a_failed_batch_after_validation_costs_nothing(engine: Engine) -> None:
    engine.create_run("run", LORA)
    batch = make_batch()
    batch[0].tokens_T[0] = 10_000
    with pytest.raises(TokenOutOfVocabularyError):
        engine.forward_backward("run", batch, "cross_entropy", {})
    with pytest.raises(NoGradientError):
        engine.optim_step("run", AdamParams())


def test_results_keep_the_order_of_the_batch(qwen3_dir: Path) -> None:
    engine = Engine.load(qwen3_dir, micro_batch_tokens=24)
    batch = make_batch(lengths=(20, 3, 18, 3, 9))
    together = engine.forward(None, batch, "cross_entropy", {})
    for datum, logprobs in zip(batch, together.logprobs, strict=True):
        alone = engine.forward(None, [datum], "cross_entropy", {}).logprobs[0]
        np.testing.assert_allclose(logprobs, alone, atol=1e-5)


def test_version_counts_steps_and_loading_weights_restarts_adam(engine: Engine) -> None:
    engine.create_run("run", LORA)
    train(engine, "run", range(3))
    tensors, _ = engine.adapter_tensors("run")
    engine.load_adapter_tensors("run", tensors)
    state = engine.export_state("run")
    assert (state.version, state.adam_steps) == (3, 0)
    assert not state.tensors["m"].any()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda tensors, name: tensors.pop(name), id="missing"),
        pytest.param(lambda tensors, name: tensors.update({name: torch.zeros(1)}), id="shape"),
        pytest.param(
            lambda tensors, name: tensors.update({name: tensors[name].to(torch.int32)}), id="dtype"
        ),
        pytest.param(lambda tensors, name: tensors[name].fill_(float("nan")), id="nan"),
        pytest.param(lambda tensors, name: tensors.update({name + "x": tensors[name]}), id="extra"),
    ],
)
def test_wrong_adapter_tensors_are_named(
    engine: Engine, damage: Callable[[dict[str, torch.Tensor], str], object]
) -> None:
    engine.create_run("run", LORA)
    engine.import_state("before", engine.export_state("run"))
    tensors, _ = engine.adapter_tensors("run")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    damage(tensors, name)
    with pytest.raises(CheckpointIncompatibleError, match=r"layers\.1\.mlp\.up_proj\.lora_B"):
        engine.load_adapter_tensors("run", tensors)
    assert_same_state(engine, "before", "run")


def test_state_of_another_rank_is_refused(engine: Engine) -> None:
    engine.create_run("run", LORA)
    engine.create_run("other", LoraConfig(rank=16, seed=0))
    with pytest.raises(CheckpointIncompatibleError):
        engine.import_state("run", engine.export_state("other"))
    state = dataclasses.replace(engine.export_state("other"), config=LORA)
    with pytest.raises(CheckpointIncompatibleError, match="theta"):
        engine.import_state("run", state)


def test_rows_are_limited_and_reused(qwen3_dir: Path) -> None:
    engine = Engine.load(qwen3_dir, max_resident_runs=2)
    engine.create_run("a", LORA)
    engine.create_run("b", LORA)
    with pytest.raises(CapacityExhaustedError):
        engine.create_run("c", LORA)
    train(engine, "a", range(1))
    engine.drop_run("a")
    engine.create_run("c", LORA)
    assert_same_state(engine, "b", "c")
    assert engine.runs() == ["b", "c"]
    assert not engine.has_run("a")


def test_requests_for_the_wrong_run_or_config(engine: Engine, tmp_path: Path) -> None:
    engine.create_run("run", LORA)
    with pytest.raises(AlreadyExistsError):
        engine.create_run("run", LORA)
    with pytest.raises(RunNotFoundError):
        engine.optim_step("nobody", AdamParams())
    absurd = {"rank": (0, 129, 10**9), "alpha": (0.0, math.nan), "seed": (-(2**63) - 1, 2**63)}
    for name, values in absurd.items():
        for value in values:
            config: Any = {"rank": 4, "seed": 0, name: value}
            with pytest.raises(InvalidFieldError, match=name):
                engine.create_run("absurd", LoraConfig(**config))
    with pytest.raises(InvalidFieldError, match="trains no layer"):
        engine.create_run("idle", LoraConfig(rank=4, train_attention=False, train_mlp=False))
    with pytest.raises(InvalidFieldError, match="beta1"):
        engine.optim_step("run", AdamParams(beta1=1.0))
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelNotFoundError):
            Engine.load(place)


def test_initial_adapters_depend_on_the_seed_alone(engine: Engine) -> None:
    for run, seed in (("a", 1), ("b", 2), ("c", 1)):
        engine.create_run(run, LoraConfig(rank=8, seed=seed))
    assert_same_state(engine, "a", "c")
    tensors, _ = engine.adapter_tensors("a")
    for name, tensor in tensors.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            # Kaiming-uniform with a = sqrt(5): uniform within 1 / sqrt(inputs).
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound
    other, _ = engine.adapter_tensors("b")
    assert any(not torch.equal(tensors[name], other[name]) for name in tensors)


# Many runs in one call.


def request(run: str | None, batch: list[Datum], **fields: object) -> BatchRequest:
    values: dict[str, object] = {"loss": "cross_entropy", "loss_config": {}, "is_backward": True}
    return BatchRequest(run=run, batch=batch, **values | fields)  # type: ignore[arg-type]


def test_a_call_for_many_runs_does_what_calls_for_each_do(engine: Engine) -> None:
    batches = [make_batch(seed=seed) for seed in range(3)]
    for run in ("a", "b", "alone-a", "alone-b"):
        engine.create_run(run, LORA)
    alone = [
        engine.forward_backward("alone-a", batches[0], "cross_entropy", {}),
        engine.forward_backward("alone-b", batches[1], "cross_entropy", {}),
        engine.forward_backward("alone-a", batches[2], "cross_entropy", {}),
        engine.forward(None, batches[0], "cross_entropy", {}),
    ]
    together = engine.compute(
        [
            request("a", batches[0]),
            request("b", batches[1]),
            request("a", batches[2]),
            request(None, batches[0], is_backward=False),
        ]
    )
    for found, wanted in zip(together, alone, strict=True):
        assert isinstance(found, BatchResult)
        assert (found.metrics, found.micro_batch_tokens) == (wanted.metrics, 0)
    adam = AdamParams(learning_rate=1e-2)
    for run in ("alone-a", "alone-b"):
        engine.optim_step(run, adam)
    steps = engine.optim_steps([("a", adam), ("b", adam)])
    assert [step.version for step in steps if isinstance(step, OptimStepResult)] == [1, 1]
    for run in ("a", "b"):
        assert_same_state(engine, run, f"alone-{run}")


def test_an_error_of_one_request_is_in_its_place_and_touches_nobody_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("a", "b", "alone-a", "alone-b"):
        engine.create_run(run, LORA)
    batch = make_batch()
    for run in ("alone-a", "alone-b"):
        engine.forward_backward(run, batch, "cross_entropy", {})
    answers = engine.compute(
        [
            request("a", batch),
            request("a", overflowing_batch(), loss="importance_sampling"),
            request("unknown", batch),
            request("b", batch),
        ]
    )
    kinds = [type(answer) for answer in answers]
    assert kinds == [BatchResult, NonFiniteLossError, RunNotFoundError, BatchResult]
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "score", lambda *_, **__: 1 / 0)
        [bug] = engine.compute([request("a", batch)])
    assert isinstance(bug, InternalError)
    for run in ("a", "b"):
        assert_same_state(engine, run, f"alone-{run}")
    engine.clear_gradient("b")
    steps = engine.optim_steps([("a", AdamParams()), ("b", AdamParams())])
    assert [type(step) for step in steps] == [OptimStepResult, NoGradientError]


def test_the_split_of_a_request_is_used_and_reported(engine: Engine) -> None:
    engine.create_run("a", LORA)
    [whole] = engine.compute([request("a", make_batch())])
    [split] = engine.compute([request("a", make_batch(), micro_batch_tokens=24)])
    assert isinstance(whole, BatchResult)
    assert isinstance(split, BatchResult)
    assert (whole.micro_batch_tokens, split.micro_batch_tokens) == (0, 24)
    for found, wanted in zip(split.logprobs, whole.logprobs, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
