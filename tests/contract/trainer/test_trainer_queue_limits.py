"""Limits of a project's waiting operations: refusals use up no number, and hold together."""

from __future__ import annotations

import asyncio

import pytest
from tests.fakes.trainer_harness import (
    TrainerRig,
    code_of,
    logprobs_of,
    make_datum,
    query_ledger,
    refusal,
    response_of,
)

from tinsmith.v1 import trainer_pb2


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"max_project_queued_operations": 4}, id="operations-of-a-project"),
        pytest.param(
            {"max_project_queued_tokens": 40, "max_batch_tokens": 40}, id="tokens-of-a-project"
        ),
    ],
)
async def test_a_project_over_its_limit_is_refused_and_no_number_consumed(
    rig: TrainerRig, limits: dict[str, int]
) -> None:
    await rig.restart(**limits)
    first, second = await rig.new_run("first"), await rig.new_run("second")
    stranger = await rig.new_run("stranger", project="q")
    with rig.engine_held():
        for _ in range(4):
            await first.forward_backward(make_datum(num_tokens=10))
        error = await refusal(second.forward_backward(number=1))
        assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert error.retry_after_s is not None
        assert 0.1 <= error.retry_after_s <= 30
        assert "your project" in error.message
        status = await second.status()
        assert (status.next_sequence_number, status.num_pending_operations) == (1, 0)
        rows = "SELECT count(*) FROM operations WHERE run = ?"
        assert query_ledger(rig.config.data_dir, rows, second.name) == [(0,)]
        # Others are not concerned.
        await stranger.forward_backward()
    await first.wait(4)
    assert logprobs_of(await second.wait(await second.forward_backward(number=1)))


async def test_a_full_project_does_not_keep_the_number_out_that_it_waits_for(
    rig: TrainerRig,
) -> None:
    await rig.restart(max_project_queued_operations=2)
    run = await rig.new_run("gap")
    await run.optim_step(number=2)
    await run.forward_backward(number=3)
    await refusal(run.forward_backward(number=4))
    await run.forward_backward(number=1)
    assert response_of(await run.wait(2), trainer_pb2.OptimStepResponse()).version == 1


async def test_calls_of_one_moment_do_not_pass_the_limit_together(rig: TrainerRig) -> None:
    await rig.restart(max_project_queued_operations=4)
    run = await rig.new_run("burst")
    with rig.engine_held():
        calls = [run.forward_backward(number=number) for number in range(1, 13)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        accepted = [answer for answer in answers if not isinstance(answer, Exception)]
        assert len(accepted) == 4
        assert (await run.status()).num_pending_operations == 4
