"""Loss functions against autograd of formulas written a second time, metrics, custom losses.

Functions compute in float32 (gspo's mean in float64), their references in float64. A token's loss
is a handful of roundings, 6e-8 each; the ratio is an exponential of a difference of about 1. So a
relative tolerance of 2e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.conftest import (
    LORA,
    VOCAB,
    gradients,
    make_batch,
    peft_model,
    randomise_b,
    reference_logprobs,
    reference_loss,
    relative_error,
)

from tinsmith.training.custom_loss import evaluate_loss
from tinsmith_engine import LOSS_SPECS, Datum, Engine
from tinsmith_engine.base.loss_specs import full_config, token_settings
from tinsmith_engine.base.types import FloatArray
from tinsmith_engine.losses.losses import LOSSES, gspo

NUM_TOKENS = 200
TOLERANCE = 2e-6


def token_inputs(loss: str, seed: int, *, has_bounds: bool = False) -> dict[str, FloatArray]:
    """Return inputs of one sequence, with zeros, both signs, and ratios on all sides."""
    random = np.random.default_rng(seed)
    coefficients = random.normal(size=NUM_TOKENS)
    coefficients[random.random(NUM_TOKENS) < 0.2] = 0.0
    if loss == "cross_entropy":
        return {"weights": coefficients.astype(np.float32)}
    found = {"logprobs": random.normal(-3.0, 0.5, NUM_TOKENS), "advantages": coefficients}
    masks = {"gspo": "sequence_ratio_mask", "stable_reinforce": "sampled_mask"}
    if loss in masks:
        found[masks[loss]] = random.random(NUM_TOKENS) < 0.6
    if has_bounds:
        found["clip_low_threshold"] = random.uniform(0.3, 1.0, NUM_TOKENS)
        found["clip_high_threshold"] = random.uniform(1.0, 2.0, NUM_TOKENS)
    return {name: values.astype(np.float32) for name, values in found.items()}


def loss_and_derivative(
    loss: str, logprobs: FloatArray, datum: Datum, config: Mapping[str, float]
) -> tuple[float, FloatArray]:
    """Return what the engine's own function says of one sequence."""
    settings = token_settings(datum, full_config(loss, config), len(logprobs))
    inputs = {**datum.loss_inputs, **settings}
    if LOSS_SPECS[loss].is_of_sequence:
        values, derivative, _ = gspo(logprobs, inputs)
        return float(values.sum(dtype=np.float64)), derivative
    columns = {name: torch.from_numpy(v.reshape(len(logprobs), -1)) for name, v in inputs.items()}
    found = LOSSES[loss](torch.from_numpy(logprobs.reshape(len(logprobs), -1)), columns)
    return float(found.loss_NK.double().sum()), found.dlogprobs_NK.view(logprobs.shape).numpy()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("loss", "config", "has_bounds"),
    [
        pytest.param("cross_entropy", {}, False, id="cross_entropy"),
        pytest.param("importance_sampling", {}, False, id="importance_sampling"),
        *(
            pytest.param(loss, config, has_bounds, id=f"{loss}-{name}")
            for loss in ("ppo", "cispo", "gspo")
            for name, config, has_bounds in (
                ("defaults", {}, False),
                ("wide", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.9}, False),
                ("one-sided", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}, False),
                ("by-token", {"clip_low_threshold": 0.1}, True),
            )
        ),
        pytest.param("dro", {}, False, id="dro-default"),
        pytest.param("dro", {"beta": 0.7}, False, id="dro-beta"),
        pytest.param("dro", {"beta": 0.0}, False, id="dro-no-penalty"),
        pytest.param("stable_reinforce", {}, False, id="stable_reinforce-default"),
        pytest.param("stable_reinforce", {"max_ratio": 0.9}, False, id="stable_reinforce-cut"),
        pytest.param("stable_reinforce", {"kl_coeff": 0.3}, False, id="stable_reinforce-kl"),
    ],
)
def test_value_and_derivative_equal_autograd(
    loss: str, config: dict[str, float], has_bounds: bool, seed: int
) -> None:
    inputs = token_inputs(loss, seed, has_bounds=has_bounds)
    random = np.random.default_rng(100 + seed)
    # A sequence whose mean ratio is anywhere from half to double.
    shift = np.log(2.0) * (seed - 1.5) / 1.5
    logprobs = random.normal(-3.0 + shift, 0.5, NUM_TOKENS).astype(np.float32)
    datum = Datum(np.zeros(NUM_TOKENS, np.int64), np.zeros(NUM_TOKENS, np.int64), inputs)

    variable = torch.from_numpy(logprobs).double().requires_grad_()
    wanted = reference_loss(loss, variable, datum, config)
    (derivative,) = torch.autograd.grad(wanted, variable)
    value, found = loss_and_derivative(loss, logprobs, datum, config)
    scale = float(derivative.abs().sum()) + abs(wanted.item())
    assert value == pytest.approx(wanted.item(), abs=TOLERANCE * scale)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, derivative.numpy(), rtol=TOLERANCE, atol=1e-7)


def test_several_targets_are_so_many_losses() -> None:
    random = np.random.default_rng(0)
    weights, logprobs = random.normal(size=(2, 30, 5)).astype(np.float32)
    datum = Datum(np.zeros(30, np.int64), np.zeros((30, 5), np.int64), {"weights": weights})
    value, derivative = loss_and_derivative("cross_entropy", logprobs, datum, {})
    assert value == pytest.approx(-(weights.astype(float) * logprobs).sum(), rel=TOLERANCE)
    np.testing.assert_array_equal(derivative, -weights)


@pytest.mark.parametrize(
    ("mask", "ratio"),
    [
        pytest.param([1, 1, 1, 1], np.exp(0.25), id="all"),
        pytest.param([0, 1, 0, 1], np.exp(0.1), id="some"),
        pytest.param([0, 0, 0, 0], 1.0, id="none-means-no-correction"),
    ],
)
def test_the_ratio_of_a_sequence_is_that_of_its_mask(mask: list[int], ratio: float) -> None:
    differences = np.array([0.5, 0.0, 0.3, 0.2], np.float32)
    inputs = {
        "logprobs": np.zeros(4, np.float32),
        "advantages": np.ones(4, np.float32),
        "sequence_ratio_mask": np.array(mask, np.float32),
        "clip_low_threshold": np.zeros(4, np.float32),
        "clip_high_threshold": np.full(4, 9.0, np.float32),
    }
    values, derivative, found = gspo(differences, inputs)
    assert found == pytest.approx(ratio, rel=1e-6)
    np.testing.assert_allclose(values, -ratio, rtol=1e-6)
    np.testing.assert_array_equal(values, derivative)


# Whole engine.


@pytest.fixture(scope="module")
def trained(qwen3_dir: Path) -> Engine:
    engine = Engine.load(qwen3_dir, micro_batch_tokens=32)
    engine.create_run("run", LORA)
    randomise_b(engine, "run")
    return engine


def with_bounds(batch: list[Datum], seed: int = 3) -> list[Datum]:
    """Give each datum clip bounds of its own, by token."""
    random = np.random.default_rng(seed)
    for datum in batch:
        shape = datum.tokens_T.shape
        assert isinstance(datum.loss_inputs, dict)
        datum.loss_inputs["clip_low_threshold"] = random.uniform(0.4, 1, shape).astype(np.float32)
        datum.loss_inputs["clip_high_threshold"] = random.uniform(1, 2, shape).astype(np.float32)
    return batch


@pytest.mark.parametrize(
    ("loss", "config", "has_bounds"),
    [
        pytest.param("cispo", {"clip_high_threshold": 2.0}, False, id="cispo"),
        pytest.param("dro", {"beta": 0.4}, False, id="dro"),
        pytest.param("ppo", {}, True, id="ppo-bounds-by-token"),
        pytest.param("gspo", {"clip_low_threshold": 0.9}, False, id="gspo"),
        pytest.param("gspo", {}, True, id="gspo-bounds-by-token"),
    ],
)
def test_settings_and_bounds_reach_the_gradient(
    trained: Engine,
    qwen3_dir: Path,
    tmp_path: Path,
    loss: str,
    config: dict[str, float],
    has_bounds: bool,
) -> None:
    trained.clear_gradient("run")
    batch = with_bounds(make_batch(loss)) if has_bounds else make_batch(loss)
    model = peft_model(qwen3_dir, trained, "run", tmp_path / "adapter", torch.float64)
    losses = [reference_loss(loss, reference_logprobs(model, d), d, config) for d in batch]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    trained.forward_backward("run", batch, loss, config)
    ours = gradients(trained, "run")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # The tolerance of test_gradients.py.
            assert relative_error(ours[name.replace(".default", "")], parameter.grad) <= 3e-6, name


def wanted_metrics(
    loss: str, config: Mapping[str, float], batch: list[Datum], logprobs: list[FloatArray]
) -> dict[str, float]:
    """Return the metrics by their definitions, in float64 and one token after the other."""
    losses, active, ratios, differences, entropies, clipped, clipped_high, sequence_ratios = (
        [] for _ in range(8)
    )
    settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, **config}
    for datum, lp_T in zip(batch, logprobs, strict=True):
        lp_T = lp_T.astype(np.float64)
        inputs = datum.loss_inputs
        losses.append(float(reference_loss(loss, torch.from_numpy(lp_T), datum, config)))
        if loss == "cross_entropy":
            active += [bool(np.any(w)) for w in inputs["weights"]]
            continue
        differences_T = lp_T - inputs["logprobs"]
        sequence_ratio = 1.0
        if loss == "gspo":
            mask = inputs["sequence_ratio_mask"]
            sequence_ratio = float(np.exp((differences_T * mask).sum() / mask.sum()))
            sequence_ratios.append(sequence_ratio)
        for token, difference in enumerate(differences_T):
            advantage = inputs["advantages"][token]
            active.append(bool(advantage))
            if not advantage:
                continue
            ratios.append(np.exp(difference))
            differences.append(-difference)
            entropies.append(-lp_T[token])
            ratio = sequence_ratio if loss == "gspo" else ratios[-1]
            low, high = (
                inputs[name][token] if name in inputs else value
                for name, value in list(settings.items())[:2]
            )
            clipped.append(ratio > high if advantage > 0 else ratio < low)
            clipped_high.append(advantage > 0 and ratio > high)
    found = {"loss:sum": sum(losses), "num_loss_tokens:sum": float(sum(active))}
    if loss != "cross_entropy":
        found["ratio:mean"] = float(np.mean(ratios))
        found["kl_v1:mean"] = float(np.mean(differences))
        found["kl_v2:mean"] = float(np.mean(np.square(differences)) / 2)
        found["entropy:mean"] = float(np.mean(entropies))
        found["ratio:max"] = float(np.max(ratios))
        found["ratio_tail_fraction:mean"] = float(np.mean([r > 2 or r < 0.5 for r in ratios]))
        found["mismatch:max"] = float(np.max(np.abs(differences)))
        dead = [not datum.loss_inputs["advantages"].any() for datum in batch]
        found["zero_advantage_fraction:mean"] = float(np.mean(dead))
    if "clip_low_threshold" in LOSS_SPECS[loss].config:
        found["clip_fraction:mean"] = float(np.mean(clipped))
        found["clip_high_fraction:mean"] = float(np.mean(clipped_high))
        found["clip_low_fraction:mean"] = float(np.mean(clipped)) - float(np.mean(clipped_high))
    if loss == "gspo":
        found["sequence_ratio:mean"] = float(np.mean(sequence_ratios))
    if loss == "stable_reinforce":
        found["truncated_fraction:mean"] = float(np.mean(np.array(ratios) > 2.0))
        found["tinsmith_stable_reinforce:max"] = 1.0
    return found


@pytest.mark.parametrize("num_targets", [None, 1, 4])
def test_metrics_of_cross_entropy(trained: Engine, num_targets: int | None) -> None:
    batch = make_batch(num_targets=num_targets)
    found = trained.forward("run", batch, "cross_entropy", {})
    assert [one.shape for one in found.logprobs] == [datum.targets_T.shape for datum in batch]
    wanted = wanted_metrics("cross_entropy", {}, batch, found.logprobs)
    assert found.metrics == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("loss", "has_bounds"),
    [
        *(pytest.param(loss, False, id=loss) for loss in LOSS_SPECS if loss != "cross_entropy"),
        *(pytest.param(loss, True, id=f"{loss}-by-token") for loss in ("ppo", "cispo", "gspo")),
    ],
)
def test_metrics_of_policy_losses(trained: Engine, loss: str, has_bounds: bool) -> None:
    trained.clear_gradient("run")
    batch = with_bounds(make_batch(loss)) if has_bounds else make_batch(loss)
    config = {"clip_low_threshold": 0.9} if LOSS_SPECS[loss].optional_inputs else {}
    scored = trained.forward("run", batch, loss, config)
    wanted = wanted_metrics(loss, config, batch, scored.logprobs)
    assert scored.metrics == pytest.approx(wanted, rel=TOLERANCE)
    # Tokens without a loss are not computed by a backward pass, and change no metric.
    trained_on = trained.forward_backward("run", batch, loss, config)
    assert trained_on.metrics == pytest.approx(scored.metrics, rel=TOLERANCE)
    if "clip_fraction:mean" in wanted:
        assert 0.0 < wanted["clip_fraction:mean"] < 1.0


@pytest.mark.parametrize("loss", list(LOSS_SPECS))
def test_a_batch_without_a_loss_has_a_gradient_of_zero(trained: Engine, loss: str) -> None:
    trained.clear_gradient("run")
    batch = make_batch(loss)
    for datum in batch:
        for values in datum.loss_inputs.values():
            values[:] = 0.0
    found = trained.forward_backward("run", batch, loss, {})
    assert (found.metrics["loss:sum"], found.metrics["num_loss_tokens:sum"]) == (0.0, 0.0)
    assert all(np.isfinite(value) for value in found.metrics.values())
    state = trained.export_state("run")
    assert state.has_gradient
    assert not state.tensors["grad"].any()
    scored = trained.forward("run", batch, loss, {})
    assert scored.metrics == found.metrics
    for logprobs, others in zip(scored.logprobs, found.logprobs, strict=True):
        assert (logprobs < 0.0).all()
        # Of tokens without a loss as well, within the rounding of other chunks.
        np.testing.assert_allclose(others, logprobs, rtol=1e-5)


def test_one_target_may_be_written_in_two_ways(trained: Engine) -> None:
    batch = make_batch()
    as_columns = [
        Datum(d.tokens_T, d.targets_T[:, None], {"weights": d.loss_inputs["weights"][:, None]})
        for d in batch
    ]
    # Of the first and the third, which share a piece, one each.
    mixed = [as_columns[0], batch[1], batch[2], as_columns[3]]
    bits = []
    for form in (batch, as_columns, mixed):
        trained.clear_gradient("run")
        found = trained.forward_backward("run", form, "cross_entropy", {})
        assert [one.shape for one in found.logprobs] == [datum.targets_T.shape for datum in form]
        gradient = trained.export_state("run").tensors["grad"].numpy().tobytes()
        bits.append(([one.tobytes() for one in found.logprobs], found.metrics, gradient))
    assert bits[0] == bits[1] == bits[2]


# Losses of the caller's own.


def pairwise_loss(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A DPO-like loss: neither linear in log-probabilities nor a sum over datums."""
    chosen, rejected = logprobs[0].sum() + logprobs[2].sum(), logprobs[1].sum() + logprobs[3].sum()
    loss = -torch.nn.functional.logsigmoid(0.01 * (chosen - rejected))
    return loss + 0.02 * logprobs[1].square().sum(), {}


@pytest.mark.parametrize("num_targets", [None, 3])
def test_a_custom_loss_is_a_linear_pass(
    trained: Engine, qwen3_dir: Path, tmp_path: Path, num_targets: int | None
) -> None:
    trained.clear_gradient("run")
    batch = make_batch(num_targets=num_targets)
    scored = trained.forward("run", batch, "cross_entropy", {})
    evaluated = evaluate_loss(pairwise_loss, [], scored.logprobs)
    linear = [
        Datum(datum.tokens_T, datum.targets_T, {"weights": -gradient})
        for datum, gradient in zip(batch, evaluated.gradients, strict=True)
    ]
    trained.forward_backward("run", linear, "cross_entropy", {})
    ours = gradients(trained, "run")

    model = peft_model(qwen3_dir, trained, "run", tmp_path / "adapter", torch.float64)
    loss, _ = pairwise_loss(None, [reference_logprobs(model, datum) for datum in batch])
    loss.backward()  # type: ignore[no-untyped-call]
    assert evaluated.value == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert relative_error(ours[name.replace(".default", "")], parameter.grad) <= 3e-6, name


def test_targets_of_a_datum_may_repeat(trained: Engine) -> None:
    # Twice the same target with half the weight is once with all of it.
    tokens = np.arange(20) % VOCAB
    weights = np.linspace(-1.0, 1.0, 20, dtype=np.float32)
    found = []
    for targets, shares in ((tokens, weights), (tokens[:, None].repeat(2, 1), None)):
        trained.clear_gradient("run")
        given = weights[:, None].repeat(2, 1) / 2 if shares is None else shares
        batch = [Datum(tokens, targets, {"weights": given})]
        trained.forward_backward("run", batch, "cross_entropy", {})
        found.append(trained.export_state("run").tensors["grad"])
    assert relative_error(found[1], found[0]) < 1e-6
