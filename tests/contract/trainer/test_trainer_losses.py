"""Each loss over the wire: shapes, metrics, and values that its formula gives."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from tests.fakes.traced_losses import (
    call,
    custom_loss,
    encode_custom,
    method,
    output,
    placeholder,
    ref,
    trace,
)
from tests.fakes.trainer_harness import (
    RunClient,
    TrainerRig,
    code_of,
    error_of,
    make_datum,
    policy_datum,
    refusal,
    response_of,
    running_trainer,
)

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import trainer_pb2, trajectories_pb2
from tinsmith_engine.host import EngineHost

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    async with running_trainer(data_dir, engine_host) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def run(rig: TrainerRig, request: pytest.FixtureRequest) -> RunClient:
    return await rig.new_run(re.sub("[^a-z0-9]+", "-", request.node.name)[-60:].strip("-"))


Outputs = list[NDArray[Any]]


async def scored(
    run: RunClient, method: str, *data: trajectories_pb2.Datum, **options: Any
) -> tuple[Outputs, dict[str, float]]:
    """Return log-probabilities and metrics of a forward or forward_backward."""
    operation = await run.wait(await run.forward_backward(*data, method=method, **options))
    response = response_of(operation, getattr(trainer_pb2, f"{method}Response")())
    return [decode_tensor(one.logprobs) for one in response.outputs], dict(response.metrics)


def tensor(datum: trajectories_pb2.Datum, name: str) -> NDArray[np.float64]:
    return np.asarray(decode_tensor(datum.loss_inputs[name]), np.float64)


def loss_of(loss: str, datum: trajectories_pb2.Datum, lp: NDArray[Any], beta: float) -> float:
    """Return the loss of a datum by the formula in the contract, with the default bounds."""
    lp = lp.astype(np.float64)
    if loss == "cross_entropy":
        return float(-(tensor(datum, "weights") * lp).sum())
    q, advantages = tensor(datum, "logprobs"), tensor(datum, "advantages")
    ratio = np.exp(lp - q)
    if loss == "gspo":
        mask = tensor(datum, "sequence_ratio_mask")
        ratio = np.full_like(lp, np.exp(((lp - q) * mask).sum() / mask.sum()))
    clipped = np.clip(ratio, 0.8, 1.2)
    is_sampled = (advantages != 0) | (q != 0)
    by_token = {
        "importance_sampling": -ratio * advantages,
        "ppo": -np.minimum(ratio * advantages, clipped * advantages),
        "gspo": -np.minimum(ratio * advantages, clipped * advantages),
        "cispo": -clipped * lp * advantages,
        "dro": -(lp * advantages - beta / 2 * (lp - q) ** 2),
    }[loss]
    return float(by_token[is_sampled].sum())


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", {}),
        ("ppo", {}),
        ("cispo", {}),
        ("dro", {}),
        ("dro", {"beta": 0.5}),
        ("gspo", {}),
    ],
)
async def test_a_policy_loss_over_the_wire(
    run: RunClient, loss: str, config: dict[str, float]
) -> None:
    mask = {"sequence_ratio_mask": np.r_[[0.0] * 3, [1.0] * 6].astype(np.float32)}
    data = [policy_datum(9, seed, **(mask if loss == "gspo" else {})) for seed in range(3)]
    logprobs, metrics = await scored(run, "Forward", *data, loss=loss, config=config)
    beta = config.get("beta", 0.05)
    wanted = sum(loss_of(loss, datum, lp, beta) for datum, lp in zip(data, logprobs, strict=True))
    assert metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["num_loss_tokens:sum"] == 18
    assert all(name.count(":") == 1 for name in metrics)
    assert {"ratio:mean", "kl_v1:mean", "kl_v2:mean", "entropy:mean"} <= metrics.keys()
    assert ("clip_fraction:mean" in metrics) == (loss in ("ppo", "cispo", "gspo"))
    assert ("sequence_ratio:mean" in metrics) == (loss == "gspo")

    trained, trained_metrics = await scored(run, "ForwardBackward", *data, loss=loss, config=config)
    assert trained_metrics == pytest.approx(metrics, rel=1e-5)
    for lp, all_lp in zip(trained, logprobs, strict=True):
        # Those of the prompt, which has no loss, as well.
        np.testing.assert_allclose(lp, all_lp, rtol=1e-5)
        assert (all_lp < 0).all()
    step = response_of(await run.wait(await run.optim_step()), trainer_pb2.OptimStepResponse())
    assert (step.version, step.metrics["grad_norm"] > 0) == (1, True)


async def test_clip_bounds_of_a_datum_replace_those_of_the_loss(run: RunClient) -> None:
    never = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    bounds = {name: np.full(6, value, np.float32) for name, value in never.items()}
    _, by_setting = await scored(run, "Forward", policy_datum(), loss="ppo", config=never)
    _, by_datum = await scored(run, "Forward", policy_datum(**bounds), loss="ppo")
    assert by_datum == by_setting
    _, clipped = await scored(run, "Forward", policy_datum(), loss="ppo")
    assert clipped["clip_fraction:mean"] > by_datum["clip_fraction:mean"] == 0.0


def ratio_loss(
    logprobs: torch.Tensor, recorded: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = torch.exp(logprobs - recorded)
    return -(ratio * advantages).sum(), {
        "custom/ratio:mean": ratio.mean(),
        "custom/advantage:sum": advantages.sum(),
    }


RATIO_LOSS = encode_custom(trace(ratio_loss, {"logprobs": 1, "recorded": 1, "advantages": 1}))


def own_datum(seed: int = 0) -> trajectories_pb2.Datum:
    """Return a datum for `ratio_loss`, with a tensor that it does not read."""
    datum = policy_datum(9, seed, weights=np.ones(9, np.float32))
    datum.loss_inputs["recorded"].CopyFrom(datum.loss_inputs["logprobs"])
    return datum


async def test_a_custom_loss_over_the_wire(rig: TrainerRig, run: RunClient) -> None:
    capabilities = await run.call(
        "GetCapabilities", trainer_pb2.TrainerServiceGetCapabilitiesRequest()
    )
    assert "custom" in capabilities.losses
    data = [own_datum(seed) for seed in range(3)]
    custom = {"loss": "custom", "custom": RATIO_LOSS}
    logprobs, metrics = await scored(run, "Forward", *data, **custom)
    wanted = [
        loss_of("importance_sampling", d, lp, 0.0) for d, lp in zip(data, logprobs, strict=True)
    ]
    ratios = [
        np.exp(lp - tensor(d, "recorded")).mean() for d, lp in zip(data, logprobs, strict=True)
    ]
    assert metrics == {
        "loss:sum": pytest.approx(sum(wanted), rel=1e-5),
        "num_loss_tokens:sum": 18.0,
        "custom/ratio:mean": pytest.approx(np.mean(ratios), rel=1e-5),
        "custom/advantage:sum": pytest.approx(
            sum(tensor(datum, "advantages").sum() for datum in data), rel=1e-5
        ),
    }
    _, trained_metrics = await scored(run, "ForwardBackward", *data, **custom)
    assert trained_metrics == metrics
    step = response_of(await run.wait(await run.optim_step()), trainer_pb2.OptimStepResponse())
    # The same as the built-in loss, on a run that is as it was.
    twin = await rig.new_run("custom-twin")
    plain = [policy_datum(9, seed) for seed in range(3)]
    await scored(twin, "ForwardBackward", *plain, loss="importance_sampling")
    reference = response_of(
        await twin.wait(await twin.optim_step()), trainer_pb2.OptimStepResponse()
    )
    assert step.metrics["grad_norm"] == pytest.approx(reference.metrics["grad_norm"], rel=1e-5)


async def test_a_custom_loss_is_refused_before_it_is_accepted(run: RunClient) -> None:
    nodes = [placeholder(), call("evil", "os.system", "true"), output("evil")]
    refused = encode_custom(custom_loss(nodes))
    error = await refusal(run.forward_backward(own_datum(), loss="custom", custom=refused))
    assert (error.reason, error.metadata["node"]) == ("CUSTOM_LOSS_REFUSED", "evil")
    assert code_of(error) == "INVALID_ARGUMENT"
    for call_of, reason in (
        (run.forward_backward(policy_datum(), loss="custom"), "INVALID_FIELD"),
        (run.forward_backward(own_datum(), loss="ppo", custom=RATIO_LOSS), "INVALID_FIELD"),
        (
            run.forward_backward(make_datum(), loss="custom", custom=RATIO_LOSS),
            "MISSING_LOSS_INPUT",
        ),
    ):
        assert (await refusal(call_of)).reason == reason
    # The numbers are consumed, and the run goes on.
    await scored(run, "ForwardBackward", own_datum(), loss="custom", custom=RATIO_LOSS)


async def test_a_custom_loss_that_fails_leaves_gradient_and_neighbours(
    rig: TrainerRig, run: RunClient
) -> None:
    twin, neighbour = await rig.new_run("fault-twin"), await rig.new_run("neighbour")
    nodes = [
        placeholder(),
        call("short", "operator.getitem", ref("logprobs"), {"slice": [0, 6, None]}),
        call("bad", "torch.add", ref("logprobs"), ref("short")),
        method("total", "sum", ref("bad")),
        output("total"),
    ]
    broken = encode_custom(custom_loss(nodes))
    for each in (run, twin):
        await scored(each, "ForwardBackward", make_datum())
    with rig.engine_held():
        failing = await run.forward_backward(own_datum(), loss="custom", custom=broken)
        beside = await neighbour.forward_backward(make_datum(seed=3))
    error = error_of(await run.wait(failing))
    assert (error.reason, error.metadata["node"]) == ("CUSTOM_LOSS_REFUSED", "bad")
    assert response_of(await neighbour.wait(beside), trainer_pb2.ForwardBackwardResponse())
    observed = run.next_number - 1
    steps = [
        response_of(await each.wait(operation), trainer_pb2.OptimStepResponse())
        for each, operation in (
            (run, await run.optim_step(observed=observed)),
            (twin, await twin.optim_step()),
        )
    ]
    assert steps[0].metrics == steps[1].metrics


async def test_several_targets_by_position(run: RunClient) -> None:
    random = np.random.default_rng(3)
    targets = random.integers(3, 90, (6, 4))
    weights = random.normal(size=(6, 4)).astype(np.float32)
    weights[1] = 0.0
    wide = make_datum(target_tokens=targets, weights=weights)
    logprobs, metrics = await scored(run, "Forward", wide, make_datum())
    assert [lp.shape for lp in logprobs] == [(6, 4), (6,)]
    wanted = loss_of("cross_entropy", wide, logprobs[0], 0.0) - float(logprobs[1].sum())
    assert metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)
    # Each target as if it were the only one.
    for column in range(4):
        (alone,), _ = await scored(run, "Forward", make_datum(target_tokens=targets[:, column]))
        np.testing.assert_allclose(logprobs[0][:, column], alone, rtol=1e-5)
    trained, _ = await scored(run, "ForwardBackward", wide, make_datum())
    np.testing.assert_allclose(trained[0], logprobs[0], rtol=1e-5)
    assert await run.step(wide) == 1
