"""What fails is one operation: its run stays as it was, and its neighbours notice nothing.

Every comparison is of bits, against engines in which the operation that fails was never sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.conftest import LORA, make_batch, randomise_b

from tinsmith_engine import (
    AdamParams,
    BatchResult,
    Datum,
    Engine,
    FullConfig,
    LoraConfig,
    OptimStepResult,
)
from tinsmith_engine.base.types import BatchRequest
from tinsmith_engine.model.model_protocol import Pass
from tinsmith_runtime.errors import (
    InternalError,
    InvalidFieldError,
    NoGradientError,
    NonFiniteLossError,
    OutOfMemoryError,
    RunNotFoundError,
    SequenceTooLongError,
    TinsmithError,
    TokenOutOfVocabularyError,
)

RUNS = ("first", "bad", "third", "full")
MICRO_BATCH_TOKENS = 64


def requests_of(run: str, *, loss: str = "ppo", lengths: Sequence[int] = (9, 40, 30)) -> Any:
    return BatchRequest(
        run=run,
        batch=make_batch(loss, lengths, seed=RUNS.index(run)),
        loss=loss,
        loss_config={},
        is_backward=True,
    )


def state_bits(engine: Engine, run: str) -> dict[str, Any]:
    state = engine.export_state(run)
    bits: dict[str, Any] = {name: row.numpy().tobytes() for name, row in state.tensors.items()}
    return bits | {"version": state.version, "adam_steps": state.adam_steps}


def result_bits(outcome: BatchResult | TinsmithError) -> Any:
    assert isinstance(outcome, BatchResult), outcome
    return [one.tobytes() for one in outcome.logprobs], outcome.metrics


def new_engine(model_dir: Path, **options: Any) -> Engine:
    engine = Engine.load(model_dir, micro_batch_tokens=MICRO_BATCH_TOKENS, **options)
    for index, run in enumerate(RUNS):
        engine.create_run(run, FullConfig() if run == "full" else LoraConfig(rank=8, seed=index))
        if run != "full":
            randomise_b(engine, run, seed=index)
    return engine


@pytest.fixture(params=[False, True], ids=["no-gradient", "gradient-pending"])
def engine(request: pytest.FixtureRequest, qwen3_dir: Path) -> Engine:
    engine = new_engine(qwen3_dir)
    if request.param:
        for run in RUNS:
            engine.forward_backward(run, make_batch(lengths=(20,)), "cross_entropy", {})
    return engine


def computed_beside(
    engine: Engine, bad: Sequence[BatchRequest]
) -> list[BatchResult | TinsmithError]:
    """Compute bad requests among good ones of the others; return what became of the bad ones.

    Checks that the run `bad` stays as it is, and that the others get the bits that they get
    without it.
    """
    good = [requests_of(run) for run in RUNS if run != "bad"]
    before = {run: engine.export_state(run) for run in RUNS}
    wanted = [result_bits(engine.compute([request])[0]) for request in good]
    wanted_states = {run: state_bits(engine, run) for run in RUNS}
    for run, state in before.items():
        engine.import_state(run, state)

    outcomes = engine.compute([good[0], *bad, *good[1:]])
    found = [outcomes[0], *outcomes[1 + len(bad) :]]
    assert [result_bits(outcome) for outcome in found] == wanted
    assert {run: state_bits(engine, run) for run in RUNS} == wanted_states
    return outcomes[1 : 1 + len(bad)]


def assert_bad_run_goes_on(engine: Engine) -> None:
    """Check that the run can be trained on as if nothing had happened."""
    engine.import_state("as-if", engine.export_state("bad"))
    for run in ("bad", "as-if"):
        engine.forward_backward(run, make_batch(), "cross_entropy", {})
        engine.optim_step(run, AdamParams())
    assert state_bits(engine, "bad") == state_bits(engine, "as-if")
    engine.drop_run("as-if")


# Numbers.


def with_logprobs(request: BatchRequest, value: float) -> BatchRequest:
    for datum in request.batch:
        datum.loss_inputs["logprobs"][3] = value
    return request


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_loss_that_overflows_is_its_own_run_s(engine: Engine, loss: str) -> None:
    # Each number is finite, and the ratio exp(lp - q) is not; dro has the square of 1e30.
    request = with_logprobs(requests_of("bad", loss=loss), -1e30)
    for datum in request.batch:
        datum.loss_inputs["advantages"][3] = -1.0
        if loss == "gspo":
            datum.loss_inputs["sequence_ratio_mask"][:] = 1.0
    if loss == "cispo":
        # A clipped ratio is finite; the bound is what overflows.
        request = dataclasses.replace(request, loss_config={"clip_high_threshold": 3e38})
        request.batch[0].loss_inputs["advantages"][3] = 1e38
    (error,) = computed_beside(engine, [request])
    assert isinstance(error, NonFiniteLossError)
    assert error.metadata["run"] == "bad"
    assert_bad_run_goes_on(engine)


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "forward_backward"])
def test_losses_that_overflow_to_both_sides(engine: Engine, is_backward: bool) -> None:
    request = with_logprobs(requests_of("bad", loss="importance_sampling"), -1e30)
    for datum, sign in zip(request.batch, (1.0, -1.0, 1.0), strict=True):
        datum.loss_inputs["advantages"][3] = sign
    (error,) = computed_beside(engine, [dataclasses.replace(request, is_backward=is_backward)])
    assert isinstance(error, NonFiniteLossError)
    base = dataclasses.replace(request, run=None, is_backward=False)
    assert isinstance(engine.compute([base])[0], NonFiniteLossError)


def test_one_nan_of_many_operations_fails_alone(engine: Engine) -> None:
    # Of three operations of one run, the one in the middle.
    requests = [requests_of("bad", loss="importance_sampling", lengths=(n,)) for n in (8, 50, 70)]
    engine.import_state("as-if", engine.export_state("bad"))
    with_logprobs(requests[1], -1e30)
    outcomes = engine.compute([*requests, requests_of("first")])
    assert isinstance(outcomes[1], NonFiniteLossError)
    for index in (0, 2):
        wanted = engine.compute([dataclasses.replace(requests[index], run="as-if")])[0]
        assert result_bits(outcomes[index]) == result_bits(wanted)
    assert state_bits(engine, "bad") == state_bits(engine, "as-if")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_poison_their_own_run_alone(
    qwen3_dir: Path, value: float
) -> None:
    engine = new_engine(qwen3_dir)
    state = engine.export_state("bad")
    state.tensors["theta"][::7] = value
    # A checkpoint with such weights is refused; a state of our own is trusted.
    engine.import_state("bad", state)
    outcomes = computed_beside(
        engine, [requests_of("bad"), dataclasses.replace(requests_of("bad"), is_backward=False)]
    )
    assert [type(outcome) for outcome in outcomes] == [NonFiniteLossError] * 2


# Requests that are wrong.


def spoilt(spoil: Callable[[Datum], Any]) -> BatchRequest:
    request = requests_of("bad")
    spoil(request.batch[1])
    return request


def test_requests_that_are_wrong_fail_alone(engine: Engine) -> None:
    bad = [
        spoilt(lambda datum: datum.tokens_T.__setitem__(2, 10_000)),
        spoilt(lambda datum: datum.targets_T.__setitem__(2, -1)),
        requests_of("bad", lengths=(257,)),
        dataclasses.replace(requests_of("bad"), run="nobody"),
        dataclasses.replace(requests_of("bad"), loss_config={"beta": 1.0}),
    ]
    outcomes = computed_beside(engine, bad)
    assert [type(outcome) for outcome in outcomes] == [
        TokenOutOfVocabularyError,
        TokenOutOfVocabularyError,
        SequenceTooLongError,
        RunNotFoundError,
        InvalidFieldError,
    ]
    assert_bad_run_goes_on(engine)


# Faults of the machine and of the code.


def fail_passes(
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    is_bad: Callable[[Pass[Any]], bool],
    error: Callable[[], Exception],
) -> list[int]:
    """Let the model fail passes after their gradients were written; return the rows of all."""
    real = engine.model.score
    seen: list[int] = []

    def score(one: Pass[Any], *, needs_gradient: bool) -> Any:
        seen.append(len(one.rows))
        found = real(one, needs_gradient=needs_gradient)
        if is_bad(one):
            raise error()
        return found

    monkeypatch.setattr(engine.model, "score", score)
    return seen


POISON = 95


def poisoned() -> BatchRequest:
    """Return a batch of one token over and over, by which a pass that holds it can be known."""
    tokens = np.full(50, POISON)
    return BatchRequest(
        run="bad",
        batch=[*make_batch(lengths=(9,)), Datum(tokens, tokens, {"weights": np.ones(50, "f4")})],
        loss="cross_entropy",
        loss_config={},
        is_backward=True,
    )


def holds_poison(one: Pass[Any]) -> bool:
    return int((one.rows.tokens_N == POISON).sum()) >= 50


def test_a_bug_that_one_operation_meets_is_its_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_passes(monkeypatch, engine, holds_poison, lambda: IndexError("off by one"))
    (error,) = computed_beside(engine, [poisoned()])
    assert type(error) is InternalError
    assert "off by one" not in str(error)
    assert "off by one" in caplog.text
    monkeypatch.undo()
    assert_bad_run_goes_on(engine)


def test_what_the_poisoned_run_asked_for_besides_is_computed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_passes(monkeypatch, engine, holds_poison, lambda: IndexError("off by one"))
    engine.import_state("as-if", engine.export_state("bad"))
    before, after = requests_of("bad"), requests_of("bad", loss="cispo")
    outcomes = engine.compute([before, poisoned(), requests_of("first"), after])
    assert [type(one) for one in outcomes[:2]] == [BatchResult, InternalError]
    for request, outcome in ((before, outcomes[0]), (after, outcomes[3])):
        wanted = engine.compute([dataclasses.replace(request, run="as-if")])[0]
        assert result_bits(outcome) == result_bits(wanted)
    assert state_bits(engine, "bad") == state_bits(engine, "as-if")


MEMORY_ERRORS = [
    pytest.param(lambda: torch.OutOfMemoryError("CUDA out of memory"), id="cuda"),
    pytest.param(
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), id="cpu"
    ),
    pytest.param(MemoryError, id="python"),
]


@pytest.mark.parametrize("error", MEMORY_ERRORS)
def test_a_batch_that_does_not_fit_is_split_and_a_replay_has_its_bits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    # 96 rows fit, so the neighbours do; of "bad" two sequences fit at a time.
    request = dataclasses.replace(
        requests_of("bad", lengths=(30, 31, 32, 33, 34)), micro_batch_tokens=512
    )
    before = engine.export_state("bad")
    fail_passes(monkeypatch, engine, lambda one: len(one.rows) > 96, error)
    together = engine.compute([requests_of("first"), request, requests_of("third")])
    found = together[1]
    assert isinstance(found, BatchResult)
    assert found.micro_batch_tokens == 80
    after = state_bits(engine, "bad")

    monkeypatch.undo()
    engine.import_state("bad", before)
    recorded = dataclasses.replace(request, micro_batch_tokens=found.micro_batch_tokens)
    replayed = engine.compute([recorded])[0]
    assert result_bits(replayed) == result_bits(found)
    assert isinstance(replayed, BatchResult)
    assert replayed.micro_batch_tokens == found.micro_batch_tokens
    assert state_bits(engine, "bad") == after


def test_neighbours_of_a_batch_that_does_not_fit_keep_their_bits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [requests_of("first"), requests_of("third", loss="gspo")]
    before = {run: engine.export_state(run) for run in ("first", "third")}
    wanted = [result_bits(engine.compute([request])[0]) for request in good]
    states = {run: state_bits(engine, run) for run in before}
    for run, state in before.items():
        engine.import_state(run, state)
    fail_passes(monkeypatch, engine, lambda one: len(one.rows) > 96, MemoryError)
    outcomes = engine.compute([good[0], requests_of("bad", lengths=(90, 50, 20)), good[1]])
    assert [result_bits(outcomes[index]) for index in (0, 2)] == wanted
    assert isinstance(outcomes[1], BatchResult)
    # The pieces of the usual split fit, once they are alone in a pass.
    assert [outcome.micro_batch_tokens for outcome in outcomes] == [0, 0, 0]  # type: ignore[union-attr]
    assert {run: state_bits(engine, run) for run in before} == states


@pytest.mark.parametrize(
    ("lengths", "longest"),
    [
        pytest.param((200,), 200, id="alone"),
        pytest.param((10, 200, 30), 200, id="among-others-of-its-batch"),
    ],
)
def test_a_sequence_that_never_fits_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], longest: int
) -> None:
    seen = fail_passes(monkeypatch, engine, lambda one: len(one.rows) > 96, MemoryError)
    (error,) = computed_beside(engine, [requests_of("bad", lengths=lengths)])
    assert isinstance(error, OutOfMemoryError)
    assert error.metadata["num_tokens"] == str(longest)
    # It gives up after halving a few times.
    assert len(seen) < 60
    monkeypatch.undo()
    assert_bad_run_goes_on(engine)


# Steps.


def test_steps_that_fail_are_their_own_runs(engine: Engine) -> None:
    for run in RUNS:
        engine.clear_gradient(run)
        engine.forward_backward(run, make_batch(lengths=(20,)), "cross_entropy", {})
    engine.create_run("idle", LORA)
    engine.create_run("overflows", LORA)
    engine.forward_backward("overflows", make_batch(), "cross_entropy", {})
    wild = AdamParams(learning_rate=1e39)
    before = {run: engine.export_state(run) for run in engine.runs()}
    for run in RUNS:
        engine.optim_step(run, AdamParams(learning_rate=1e-2))
    wanted = {run: state_bits(engine, run) for run in RUNS}
    for run, state in before.items():
        engine.import_state(run, state)

    adam = AdamParams(learning_rate=1e-2)
    outcomes = engine.optim_steps(
        [
            ("first", adam),
            ("idle", adam),
            ("bad", adam),
            ("overflows", wild),
            ("nobody", adam),
            ("third", adam),
            ("third", AdamParams(beta1=1.0)),
            ("full", adam),
        ]
    )
    assert [type(outcome) for outcome in outcomes] == [
        OptimStepResult,
        NoGradientError,
        OptimStepResult,
        NonFiniteLossError,
        RunNotFoundError,
        OptimStepResult,
        InvalidFieldError,
        OptimStepResult,
    ]
    assert {run: state_bits(engine, run) for run in RUNS} == wanted
    # Weights, moments and count as before, the gradient cleared.
    overflowed = engine.export_state("overflows")
    assert (overflowed.has_gradient, overflowed.version) == (False, 0)
    for name in ("theta", "m", "v"):
        assert torch.equal(overflowed.tensors[name], before["overflows"].tensors[name])


def test_a_gradient_that_is_not_finite_is_cleared_by_the_step(qwen3_dir: Path) -> None:
    engine = new_engine(qwen3_dir)
    engine.forward_backward("bad", make_batch(), "cross_entropy", {})
    before = engine.export_state("bad")
    broken = dataclasses.replace(before, tensors=dict(before.tensors))
    broken.tensors["grad"] = torch.full_like(before.tensors["grad"], 1e30)
    engine.import_state("bad", broken)
    # The square of the norm overflows float32, so the norm is not known.
    with pytest.raises(NonFiniteLossError):
        engine.optim_step("bad", AdamParams())
    after = engine.export_state("bad")
    assert not after.has_gradient
    for name in ("theta", "m", "v"):
        assert torch.equal(after.tensors[name], before.tensors[name])
    # What the row still holds does not leak into the next gradient.
    engine.import_state("as-if", after)
    for run in ("bad", "as-if"):
        engine.forward_backward(run, make_batch(seed=4), "cross_entropy", {})
    assert state_bits(engine, "bad") == state_bits(engine, "as-if")
