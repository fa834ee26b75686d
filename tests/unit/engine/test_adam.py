"""Steps of rows against torch.optim.AdamW, and the bound that spares a look at the result."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.conftest import LORA, make_batch, relative_error

from tinsmith_engine import AdamParams, Engine
from tinsmith_engine.arena.adam import SlotBound, SlotStep, adamw_, clip_factor, grad_norm
from tinsmith_engine.arena.slots import Arena, ParameterLayout, Slot
from tinsmith_runtime.errors import NonFiniteLossError

WIDTH = 192


def new_rows(count: int) -> list[Slot]:
    arena = Arena(ParameterLayout([("a", (WIDTH,))]), torch.device("cpu"))
    return [arena.take() for _ in range(count)]


def filled(slot: Slot, generator: torch.Generator, scale: float = 1.0) -> Slot:
    slot.theta_P.normal_(generator=generator)
    slot.grad_P.normal_(std=scale, generator=generator)
    return slot


def bits(slot: Slot) -> list[bytes]:
    return [part.numpy().tobytes() for part in (slot.theta_P, slot.m_P, slot.v_P)]


PARAMS = [
    pytest.param(AdamParams(), id="defaults"),
    pytest.param(AdamParams(learning_rate=0.1, weight_decay=0.3), id="decay"),
    pytest.param(AdamParams(learning_rate=0.1, grad_clip_norm=0.5), id="clipped"),
    pytest.param(AdamParams(learning_rate=0.1, grad_clip_norm=1e6), id="clip-not-reached"),
    pytest.param(AdamParams(beta1=0.0, beta2=0.5, eps=1e-3), id="betas"),
    pytest.param(AdamParams(learning_rate=0.0), id="no-step"),
]


@pytest.mark.parametrize("params", PARAMS)
def test_steps_equal_torch(params: AdamParams) -> None:
    generator = torch.Generator().manual_seed(0)
    (slot,) = new_rows(1)
    parameter = torch.nn.Parameter(filled(slot, generator).theta_P.clone())
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        foreach=False,
        fused=False,
    )
    for step in range(1, 6):
        slot.grad_P.normal_(generator=generator)
        parameter.grad = slot.grad_P.clone()
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_([parameter], params.grad_clip_norm)
        optimizer.step()
        adamw_([SlotStep(slot, step, params, grad_norm(slot.grad_P))])
        state = optimizer.state[parameter]
        # Torch's fused kernel and its plain one round differently, a unit in the last place a step.
        for found, wanted in (
            (slot.theta_P, parameter.detach()),
            (slot.m_P, state["exp_avg"]),
            (slot.v_P, state["exp_avg_sq"]),
        ):
            assert relative_error(found, wanted) <= 1e-6


def test_rows_that_step_together_have_the_bits_of_each_alone() -> None:
    # Each with its own settings, step count, and scale of gradient.
    settings_of = [parameter.values[0] for parameter in PARAMS]
    together, alone = new_rows(len(settings_of)), new_rows(len(settings_of))
    for rows in (together, alone):
        for index, slot in enumerate(rows):
            filled(slot, torch.Generator().manual_seed(index), scale=10.0 ** (index - 3))
    steps = [
        [
            SlotStep(slot, index + 1, params, grad_norm(slot.grad_P))
            for index, (slot, params) in enumerate(zip(rows, settings_of, strict=True))
        ]
        for rows in (together, alone)
    ]
    adamw_(steps[0])
    for step in reversed(steps[1]):
        adamw_([step])
    assert [bits(slot) for slot in together] == [bits(slot) for slot in alone]


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [(2.0, 0.0, 1.0), (2.0, 4.0, 1.0), (2.0, 1.0, 1.0 / (2.0 + 1e-6)), (0.0, 1.0, 1.0)],
)
def test_the_clip_is_torch_s(norm: float, max_norm: float, factor: float) -> None:
    assert clip_factor(norm, max_norm) == factor


def test_the_norm_of_what_is_not_finite_is_not() -> None:
    gradient = torch.ones(WIDTH)
    assert grad_norm(gradient) == pytest.approx(math.sqrt(WIDTH))
    for value in (math.inf, -math.inf, math.nan, 1e30):
        gradient[7] = value
        assert not math.isfinite(grad_norm(gradient))


# The bound.

magnitudes = st.floats(-30.0, 18.0).map(lambda exponent: 10.0**exponent)
hyper_parameters = st.builds(
    AdamParams,
    learning_rate=st.floats(-8.0, 34.0).map(lambda exponent: 10.0**exponent),
    beta1=st.one_of(st.just(0.0), st.floats(0.0, 0.9999)),
    beta2=st.one_of(st.just(0.0), st.floats(0.0, 0.999999)),
    eps=st.sampled_from([1e-3, 1e-8, 1e-12, 1e-14, 1e-16, 1e-30, 1e-50]),
    weight_decay=st.one_of(st.just(0.0), st.floats(0.0, 10.0)),
    grad_clip_norm=st.sampled_from([0.0, 1.0]),
)
gradients = st.tuples(magnitudes, st.integers(0, 1 << 20), st.floats(0.0, 1.0))


@given(theta_scale=magnitudes, steps=st.lists(st.tuples(hyper_parameters, gradients), max_size=6))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_a_bound_holds_whatever_the_steps_are(
    theta_scale: float, steps: list[tuple[AdamParams, tuple[float, int, float]]]
) -> None:
    (slot,) = new_rows(1)
    slot.theta_P.normal_(generator=torch.Generator().manual_seed(0)).mul_(theta_scale)
    bound = SlotBound.of(slot)
    assert float(slot.theta_P.abs().max()) == bound.largest
    for count, (params, (scale, seed, share_of_zeros)) in enumerate(steps, start=1):
        generator = torch.Generator().manual_seed(seed)
        slot.grad_P.normal_(generator=generator).mul_(scale)
        slot.grad_P[torch.rand(WIDTH, generator=generator) < share_of_zeros] = 0.0
        norm = grad_norm(slot.grad_P)
        if not math.isfinite(norm):
            # The engine refuses the step.
            continue
        bound = bound.after(params)
        adamw_([SlotStep(slot, count, params, norm)])
        if not bound.largest < 1e36:
            # The engine looks at what came out, and at the slot before the next step.
            return
        # The bound is of real numbers; float32 rounds each step.
        assert float(slot.theta_P.abs().max()) <= bound.largest * (1 + 1e-5)


@pytest.mark.parametrize("m", [0.0, 3.0])
def test_a_row_of_somebody_else_is_looked_at(m: float) -> None:
    (slot,) = new_rows(1)
    slot.theta_P.fill_(-2.0)
    slot.m_P.fill_(m)
    bound = SlotBound.of(slot)
    # No step makes a first moment without a second.
    assert bound == SlotBound(2.0, math.inf if m else 0.0)
    slot.v_P.fill_(4.0)
    assert SlotBound.of(slot) == SlotBound(2.0, m / 2)
    assert SlotBound.unknown().after(AdamParams()).largest == math.inf


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(AdamParams(eps=1e-50), id="eps-is-0-in-float32"),
        pytest.param(AdamParams(learning_rate=1e39), id="rate-overflows"),
        pytest.param(AdamParams(learning_rate=1e30, weight_decay=1e30), id="decay-overflows"),
    ],
)
@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_a_step_that_is_no_number_is_taken_back(
    qwen3_dir: Path, params: AdamParams, num_steps_before: int
) -> None:
    engine = Engine.load(qwen3_dir, max_resident_runs=8)
    # B is zero at first, and so is the gradient of A: of 0 / (0 + eps) nothing is left but eps.
    engine.create_run("run", dataclasses.replace(LORA, train_attention=False))
    for step in itertools.count():
        engine.forward_backward("run", make_batch(seed=step), "cross_entropy", {})
        if step == num_steps_before:
            break
        engine.optim_step("run", AdamParams(learning_rate=0.0))
    before = engine.export_state("run")
    with pytest.raises(NonFiniteLossError):
        engine.optim_step("run", params)
    after = engine.export_state("run")
    assert (after.version, after.adam_steps) == (before.version, before.adam_steps)
    assert not after.has_gradient
    for name in ("theta", "m", "v"):
        assert after.tensors[name].numpy().tobytes() == before.tensors[name].numpy().tobytes()
    engine.forward_backward("run", make_batch(), "cross_entropy", {})
    assert engine.optim_step("run", AdamParams()).version == before.version + 1
