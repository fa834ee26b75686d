"""Custom losses become a pass that is linear in log-probabilities, with the right weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.sdk_fake_server import FakeServer

import tinsmith
from tinsmith import tensors

Data = Sequence[tinsmith.Datum]

# The fake scores token t with -0.1 * (t + 1), so these are its answers for targets 2, 3, 4.
LOGPROBS = np.array([-0.3, -0.4, -0.5], dtype=np.float32)


def square_torch(data: Data, logprobs: list[Any]) -> tuple[Any, dict[str, Any]]:
    value = sum((lp**2).sum() for lp in logprobs)
    return value, {"square:sum": value}


def square_numpy(data: Data, logprobs: list[Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    value = sum(float(np.square(lp).sum()) for lp in logprobs)
    return value, [2 * np.asarray(lp) for lp in logprobs], {"square:sum": value}


@pytest.mark.parametrize(
    "loss_fn",
    [
        pytest.param(square_torch, id="torch"),
        pytest.param(square_numpy, id="numpy"),
        pytest.param(tinsmith.numpy_loss(lambda d, lp: square_numpy(d, lp)), id="marked-numpy"),
    ],
)
def test_the_linear_pass_has_the_gradient_of_the_loss(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data, loss_fn: Any
) -> None:
    result = run.forward_backward_custom(data, loss_fn).result(timeout=10)
    forward, backward = (request for _, request in server.state.requests)
    scored = tensors.decode_tensor(forward.data[0].loss_inputs["weights"])
    assert scored.tolist() == [1, 1, 1]
    assert [backward.loss.name, backward.sequence_number] == ["cross_entropy", 2]
    weights = tensors.decode_tensor(backward.data[0].loss_inputs["weights"]).astype(np.float32)
    # float32 throughout, one multiplication: a few units in the last place.
    np.testing.assert_allclose(weights, -2 * LOGPROBS, rtol=1e-6)
    assert result.loss == pytest.approx(float(np.square(LOGPROBS).sum()), rel=1e-6)
    assert result.metrics["square:sum"] == pytest.approx(result.loss)
    assert result.metrics["surrogate_loss:sum"] == pytest.approx(
        float(-(weights * LOGPROBS).sum()), rel=1e-6
    )


def test_several_targets_by_position_are_several_log_probabilities(
    server: FakeServer, run: tinsmith.TrainingRun
) -> None:
    targets = np.array([[2, 3], [4, 5], [6, 7]])
    wide = tinsmith.Datum(
        tinsmith.ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": targets, "weights": np.ones((3, 2))},
    )
    plain = run.forward_backward([wide]).result(timeout=10)
    np.testing.assert_allclose(plain.outputs[0].logprobs, -0.1 * (targets + 1), rtol=1e-6)
    run.forward_backward_custom([wide], square_torch).result(timeout=10)
    sent = [request.data[0].loss_inputs for _, request in server.state.requests]
    for inputs in sent:
        assert tensors.decode_tensor(inputs["target_tokens"]).tolist() == targets.tolist()
    weights = tensors.decode_tensor(sent[-1]["weights"])
    np.testing.assert_allclose(weights, 0.2 * (targets + 1), rtol=1e-6)


async def test_the_async_form_gives_a_future(server: FakeServer, data: Data) -> None:
    async with await tinsmith.Client.connect_async(server.address, "tsk_test") as client:
        run = await client.create_lora_training_run_async("tiny")
        future = await run.forward_backward_custom_async(data, square_torch)
        update = run.optim_step()
        assert (await future).loss == pytest.approx(0.5, rel=1e-5)
        assert (await update).version == 1


def test_a_datum_that_the_loss_ignores_gets_no_gradient(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    def first_only(data: Data, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return logprobs[0].sum(), {}

    run.forward_backward_custom([*data, *data], first_only).result(timeout=10)
    backward = server.state.requests[-1][1]
    weights = [tensors.decode_tensor(datum.loss_inputs["weights"]) for datum in backward.data]
    assert weights[0].tolist() == [-1, -1, -1]
    assert weights[1].tolist() == [0, 0, 0]


def test_a_loss_that_raises_leaves_the_run_usable(run: tinsmith.TrainingRun, data: Data) -> None:
    def broken(data: Data, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        raise KeyError("chosen")

    with pytest.raises(KeyError):
        run.forward_backward_custom(data, broken)
    assert run.forward_backward(data).result(timeout=10).loss > 0


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        pytest.param(lambda d, lp: (lp[0].detach().sum(), {}), "does not depend", id="detached"),
        pytest.param(lambda d, lp: (lp[0].sum(),), "returned 1 values", id="one-value"),
        pytest.param(lambda d, lp: (0.0, [np.zeros(2)], {}), "shapes", id="shapes"),
        pytest.param(lambda d, lp: (torch.log(lp[0] * 0).sum(), {}), "NaN or inf", id="nan"),
    ],
)
def test_a_wrong_loss_is_named(
    run: tinsmith.TrainingRun, data: Data, loss_fn: Any, message: str
) -> None:
    with pytest.raises(tinsmith.InvalidArgumentError, match=message):
        run.forward_backward_custom(data, loss_fn)
