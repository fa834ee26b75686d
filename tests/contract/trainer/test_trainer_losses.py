"""Each loss over the wire: shapes, metrics, and values that its formula gives."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from tests.fakes.trainer_harness import (
    RunClient,
    TrainerRig,
    policy_datum,
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
