"""Losses that clients wrote: the same numbers as torch and as the built-in ones, and no way out.

The built-in losses are written by hand, the graphs go through autograd; both in float32. Over
several seeds, on adapters and full weights, the gradients of the four were the same bits; the
tolerance of 1e-6 leaves room for other builds, which may round the same formula elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.traced_losses import (
    Loss,
    call,
    custom_loss,
    method,
    output,
    placeholder,
    ref,
    trace,
)
from tests.unit.engine.conftest import (
    LORA,
    gradients,
    make_batch,
    randomise_b,
    relative_error,
    save_tiny,
)

from tinsmith_engine import (
    BatchRequest,
    BatchResult,
    CustomLoss,
    Datum,
    Engine,
    FullConfig,
)
from tinsmith_engine.losses.custom_loss import compute_custom_loss
from tinsmith_engine.losses.loss_graphs import read_graph
from tinsmith_engine.losses.loss_operations import ALIASES, FUNCTIONS
from tinsmith_runtime.errors import CustomLossRefusedError, NonFiniteLossError, TinsmithError

TOLERANCE = 1e-6
Metrics = dict[str, torch.Tensor]


def cross_entropy(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    return -(weights * logprobs).sum(), {
        "custom/tokens:sum": (weights != 0).float().sum(),
        "custom/weight:mean": weights.sum() / weights.shape[0],
    }


def importance_sampling(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    return -(torch.exp(logprobs - old_logprobs) * advantages).sum(), {}


def ppo(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum(), {}


def entropy_weighted(
    logprobs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    surprise = (-logprobs).detach()
    weight = torch.softmax(surprise, dim=-1) * logprobs.shape[0]
    return -(weight * advantages * logprobs).sum(), {"custom/surprise:mean": surprise.mean()}


def of_sequence(logprobs: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    ratio = torch.exp(logprobs.mean() + 4.0)
    return -torch.nn.functional.softplus(ratio) * advantages[-1], {}


RANKS = {"logprobs": 1}
POLICY_RANKS = {"logprobs": 1, "old_logprobs": 1, "advantages": 1}


def renamed(batch: list[Datum]) -> list[Datum]:
    """Return a batch whose recorded log-probabilities do not have the name of the current ones."""
    return [
        dataclasses.replace(
            datum,
            loss_inputs={
                "old_logprobs" if name == "logprobs" else name: values
                for name, values in datum.loss_inputs.items()
            },
        )
        for datum in batch
    ]


def only(batch: list[Datum], *names: str) -> list[Datum]:
    return [
        dataclasses.replace(datum, loss_inputs={name: datum.loss_inputs[name] for name in names})
        for datum in batch
    ]


def request(
    run: str | None, batch: list[Datum], custom: CustomLoss, **changes: Any
) -> BatchRequest:
    one = BatchRequest(
        run=run, batch=batch, loss="custom", loss_config={}, is_backward=True, custom=custom
    )
    return dataclasses.replace(one, **changes)


def compute(engine: Engine, one: BatchRequest) -> BatchResult:
    [found] = engine.compute([one])
    assert isinstance(found, BatchResult), found
    return found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def engine(model_dir: Path) -> Engine:
    engine = Engine.load(model_dir, max_resident_runs=8, micro_batch_tokens=32)
    for run in ("ours", "theirs"):
        engine.create_run(run, LORA)
        randomise_b(engine, run)
    return engine


# Values.


@pytest.mark.parametrize("is_full", [False, True], ids=["adapter", "full"])
@pytest.mark.parametrize(
    ("loss", "function", "num_targets"),
    [
        pytest.param("cross_entropy", cross_entropy, None, id="cross_entropy"),
        pytest.param("cross_entropy", cross_entropy, 3, id="cross_entropy-3-targets"),
        pytest.param("importance_sampling", importance_sampling, None, id="importance_sampling"),
        pytest.param("ppo", ppo, None, id="ppo"),
    ],
)
def test_graphs_give_the_gradients_of_the_losses_that_they_are(
    engine: Engine, loss: str, function: Loss, num_targets: int | None, is_full: bool
) -> None:
    runs = ("ours", "theirs")
    if is_full:
        runs = ("full-ours", "full-theirs")
        for run in runs:
            engine.create_run(run, FullConfig())
    ours, theirs = runs
    batch = make_batch(loss, num_targets=num_targets)
    rank = 1 if num_targets is None else 2
    ranks = {"logprobs": rank, "weights": rank} if loss == "cross_entropy" else POLICY_RANKS
    wanted = engine.forward_backward(theirs, batch, loss, {})
    found = compute(engine, request(ours, renamed(batch), trace(function, ranks)))
    assert found.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"], rel=1e-6)
    scored = engine.forward(theirs, batch, loss, {})
    for logprobs, reference in zip(found.logprobs, scored.logprobs, strict=True):
        np.testing.assert_array_equal(logprobs, reference)
    states = [engine.export_state(run).tensors["grad"] for run in (ours, theirs)]
    assert relative_error(*states) <= TOLERANCE
    # Without a gradient: the same loss and metrics, and nothing that is added.
    forward = compute(
        engine, request(ours, renamed(batch), trace(function, ranks), is_backward=False)
    )
    assert forward.metrics == found.metrics
    assert torch.equal(engine.export_state(ours).tensors["grad"], states[0])


@pytest.mark.parametrize("function", [entropy_weighted, of_sequence])
def test_other_graphs_give_the_gradients_of_autograd(engine: Engine, function: Loss) -> None:
    batch = only(make_batch("ppo"), "advantages")
    custom = trace(function, {"logprobs": 1, "advantages": 1})
    found = compute(engine, request("ours", batch, custom))
    total = 0.0
    weighted = []
    for datum, logprobs in zip(batch, found.logprobs, strict=True):
        current = torch.tensor(logprobs, requires_grad=True)
        loss, _ = function(current, torch.from_numpy(datum.loss_inputs["advantages"]))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        assert current.grad is not None
        weights = -current.grad.numpy()
        weighted.append(dataclasses.replace(datum, loss_inputs={"weights": weights}))
    assert found.metrics["loss:sum"] == pytest.approx(total, rel=1e-6)
    engine.forward_backward("theirs", weighted, "cross_entropy", {})
    ours, theirs = gradients(engine, "ours"), gradients(engine, "theirs")
    for name, reference in theirs.items():
        assert relative_error(ours[name], reference) <= TOLERANCE, name


def test_metrics_are_sums_and_means_over_datums(engine: Engine) -> None:
    batch = make_batch()
    custom = trace(cross_entropy, {"logprobs": 1, "weights": 1})
    found = compute(engine, request("ours", batch, custom)).metrics
    weights = [datum.loss_inputs["weights"] for datum in batch]
    num_tokens = sum(np.count_nonzero(one) for one in weights)
    assert found["num_loss_tokens:sum"] == num_tokens
    assert found["custom/tokens:sum"] == num_tokens
    mean = np.mean([one.mean() for one in weights])
    assert found["custom/weight:mean"] == pytest.approx(mean, rel=1e-5)


def random_graph(seed: int) -> Loss:
    """Return a loss of operations that were drawn."""
    random = np.random.default_rng(seed)
    unary: list[Callable[[Any], Any]] = [
        torch.sigmoid,
        torch.tanh,
        torch.nn.functional.softplus,
        torch.nn.functional.relu,
        lambda x: torch.log_softmax(x, dim=0),
        lambda x: torch.cumsum(x, dim=0) / x.shape[0],
        lambda x: x[1:].mean() - x[..., :-1],
        lambda x: torch.where(x > 0, x, 0.5 * x),
        lambda x: x.clamp(min=-3.0) ** 2,
        lambda x: torch.cat([x, x.flip(0)]).reshape(2, -1).mean(dim=0),
        lambda x: torch.nn.functional.pad(x, (1, 0)),
        lambda x: x - x.max(),
    ]
    binary: list[Callable[[Any, Any], Any]] = [
        lambda x, y: x[:2] * y[:2],
        lambda x, y: torch.logaddexp(x.mean(), y),
        lambda x, y: x - y.detach().mean(),
        lambda x, y: torch.minimum(x, y.sum()),
    ]
    plan = [
        (int(random.integers(2)), int(random.integers(12)), int(random.integers(4)))
        for _ in range(12)
    ]

    def loss(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        x, y = logprobs, logprobs * weights
        for is_unary, first, second in plan:
            x, y = (unary[first](x), x) if is_unary else (binary[second](x, y), y)
        return x.sum() + y.mean(), {"custom/x:sum": x.detach().amax()}

    return loss


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs_equal_torch(seed: int) -> None:
    function = random_graph(seed)
    random = np.random.default_rng(seed + 100)
    logprobs = random.normal(-2.0, 1.0, 9).astype(np.float32)
    weights = random.normal(size=9).astype(np.float32)
    graph = read_graph(trace(function, {"logprobs": 1, "weights": 1}))
    found = compute_custom_loss(graph, [logprobs, weights], needs_gradient=True)
    current = torch.tensor(logprobs, requires_grad=True)
    loss, metrics = function(current, torch.from_numpy(weights))
    loss.backward()  # type: ignore[no-untyped-call]
    assert current.grad is not None
    assert found.loss == loss.item()
    assert torch.equal(found.dlogprobs, current.grad)
    assert found.metrics == {name: value.item() for name, value in metrics.items()}


# Company, splits, replay.


def test_neighbours_and_splits_change_no_bit(engine: Engine) -> None:
    batch, others = make_batch(), make_batch(seed=5)
    custom = trace(entropy_weighted, {"logprobs": 1, "advantages": 1})
    own = only(make_batch("ppo", lengths=(40, 9, 12)), "advantages")
    alone = compute(engine, request("ours", own, custom))
    gradient = engine.export_state("ours").tensors["grad"]
    engine.clear_gradient("ours")
    engine.create_run("third", LORA)
    neighbour = BatchRequest(
        run="theirs", batch=batch, loss="cross_entropy", loss_config={}, is_backward=True
    )
    third = dataclasses.replace(neighbour, run="third", batch=others)
    found = engine.compute([neighbour, request("ours", own, custom), third])
    assert isinstance(found[1], BatchResult)
    assert found[1].metrics == alone.metrics
    assert torch.equal(engine.export_state("ours").tensors["grad"], gradient)
    # A datum of 40 tokens is longer than a piece, and is not cut: its loss is of all its tokens.
    engine.clear_gradient("ours")
    split = compute(engine, request("ours", own, custom, micro_batch_tokens=1))
    assert split.metrics == alone.metrics
    assert relative_error(engine.export_state("ours").tensors["grad"], gradient) <= TOLERANCE


def test_a_fallback_model_computes_them_too(tmp_path: Path) -> None:
    engine = Engine.load(save_tiny(tmp_path, "gpt_neox"))
    assert engine.info.exactness == "fallback"
    for run in ("ours", "theirs"):
        engine.create_run(run, LORA)
        randomise_b(engine, run)
    batch = make_batch("ppo")
    wanted = engine.forward_backward("theirs", batch, "ppo", {})
    found = compute(engine, request("ours", renamed(batch), trace(ppo, POLICY_RANKS)))
    assert found.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"], rel=1e-6)
    states = [engine.export_state(run).tensors["grad"] for run in ("ours", "theirs")]
    assert relative_error(*states) <= TOLERANCE


# Faults.


def failing() -> CustomLoss:
    nodes = [
        placeholder(),
        call("part", "operator.getitem", ref("logprobs"), {"slice": [0, 6, None]}),
        call("bad", "torch.add", ref("logprobs"), ref("part")),
        method("total", "sum", ref("bad")),
        output("total"),
    ]
    return custom_loss(nodes)


def test_a_fault_is_typed_and_of_its_own_operation_alone(engine: Engine) -> None:
    batch = only(make_batch(lengths=(6, 9)))
    good = BatchRequest(
        run="theirs", batch=make_batch(), loss="cross_entropy", loss_config={}, is_backward=True
    )
    engine.compute([dataclasses.replace(good, run="ours")])
    before = engine.export_state("ours").tensors["grad"]
    found = engine.compute([good, request("ours", batch, failing())])
    assert isinstance(found[0], BatchResult)
    error = found[1]
    assert isinstance(error, CustomLossRefusedError)
    assert (error.metadata["node"], error.reason) == ("bad", "CUSTOM_LOSS_REFUSED")
    assert "data[1]" in error.message
    assert torch.equal(engine.export_state("ours").tensors["grad"], before)


@pytest.mark.parametrize("constant", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_the_operations_own(engine: Engine, constant: str) -> None:
    nodes = [
        placeholder(),
        call("spoilt", "operator.mul", ref("logprobs"), {"float": constant}),
        method("total", "sum", ref("spoilt")),
        output("total"),
    ]
    [error] = engine.compute([request("ours", only(make_batch()), custom_loss(nodes))])
    assert isinstance(error, NonFiniteLossError)
    assert not engine.export_state("ours").has_gradient


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({"custom": None}, "is required", id="no-graph"),
        pytest.param({"loss": "ppo"}, "is no part", id="graph-of-another-loss"),
        pytest.param({"loss_config": {"beta": 1.0}}, "is not a setting", id="setting"),
    ],
)
def test_graph_and_name_go_together(engine: Engine, changes: dict[str, Any], problem: str) -> None:
    custom = trace(cross_entropy, {"logprobs": 1, "weights": 1})
    one = dataclasses.replace(request("ours", make_batch(), custom), **changes)
    [error] = engine.compute([one])
    assert isinstance(error, TinsmithError)
    assert problem in error.message


@pytest.mark.parametrize(
    ("ranks", "inputs", "reason"),
    [
        pytest.param({"logprobs": 2, "weights": 1}, {}, "SHAPE_MISMATCH", id="logprobs"),
        pytest.param({"logprobs": 1, "weights": 2}, {}, "SHAPE_MISMATCH", id="declared-2"),
        pytest.param({"logprobs": 1, "weights": 0}, {}, "SHAPE_MISMATCH", id="declared-0"),
        pytest.param(
            {"logprobs": 1, "weights": 1},
            {"weights": np.ones(3, np.float32)},
            "SHAPE_MISMATCH",
            id="other-length",
        ),
        pytest.param(
            {"logprobs": 1, "weights": 0},
            {"weights": np.array(np.nan, np.float32)},
            "NOT_FINITE",
            id="nan",
        ),
        pytest.param({"logprobs": 1, "other": 1}, {}, "MISSING_LOSS_INPUT", id="missing"),
    ],
)
def test_inputs_have_the_ranks_that_the_loss_declares(
    engine: Engine, ranks: dict[str, int], inputs: dict[str, Any], reason: str
) -> None:
    names = [*ranks]
    nodes = [*map(placeholder, names), method("total", "sum", ref("logprobs")), output("total")]
    [datum] = make_batch(lengths=(5,))
    datum = dataclasses.replace(datum, loss_inputs={**datum.loss_inputs, **inputs})
    [error] = engine.compute([request("ours", [datum], custom_loss(nodes, ranks))])
    assert isinstance(error, TinsmithError)
    assert error.reason == reason


def test_scalars_and_targets_are_inputs_too(engine: Engine) -> None:
    ranks = {"logprobs": 1, "scale": 0, "target_tokens": 1}
    nodes = [
        *map(placeholder, ranks),
        call("is_low", "operator.lt", ref("target_tokens"), 48),
        method("mask", "float", ref("is_low")),
        call("scaled", "torch.mul", ref("logprobs"), ref("scale")),
        call("masked", "torch.mul", ref("scaled"), ref("mask")),
        method("total", "sum", ref("masked")),
        output("total"),
    ]
    [datum] = make_batch(lengths=(7,))
    datum = dataclasses.replace(datum, loss_inputs={"scale": np.array(0.5, np.float32)})
    found = compute(engine, request("ours", [datum], custom_loss(nodes, ranks)))
    wanted = (0.5 * found.logprobs[0] * (datum.targets_T < 48)).sum()
    assert found.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6)
    assert found.metrics["num_loss_tokens:sum"] == (datum.targets_T < 48).sum()


# Masks and names.


def test_masks_select_and_attributes_are_read() -> None:
    nodes = [
        placeholder(),
        call("mask", "operator.gt", ref("logprobs"), -2.5),
        call("chosen", "operator.getitem", ref("logprobs"), ref("mask")),
        method("sorted_pair", "max", ref("logprobs"), dim=0),
        call("highest", "getattr", ref("sorted_pair"), "values"),
        method("sum_1", "sum", ref("chosen")),
        call("total", "operator.sub", ref("sum_1"), ref("highest")),
        output("total"),
    ]
    logprobs = np.array([-3.0, -2.0, -1.0], np.float32)
    found = compute_custom_loss(read_graph(custom_loss(nodes)), [logprobs], needs_gradient=True)
    assert found.loss == -2.0
    assert found.dlogprobs.tolist() == [0.0, 1.0, 0.0]


def test_other_names_of_functions_lead_to_the_list() -> None:
    assert set(ALIASES.values()) <= FUNCTIONS.keys()
    assert not ALIASES.keys() & FUNCTIONS.keys()
