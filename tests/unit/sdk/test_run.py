"""Ordered calls of a run against a real server with a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2
from tests.fakes.sdk_fake_server import RUN, FakeServer, make_status, unavailable
from tests.support.wait import until
from tests.unit.sdk.conftest import FAST

import tinsmith

Data = list[tinsmith.Datum]


def invalid() -> object:
    return make_status(
        code_pb2.INVALID_ARGUMENT, "SHAPE_MISMATCH", "weights has 2 elements", field="weights"
    )


def test_a_step_gives_loss_and_version(run: tinsmith.TrainingRun, data: Data) -> None:
    gradient = run.forward_backward(data, "cross_entropy")
    update = run.optim_step(tinsmith.AdamParams(learning_rate=1e-4))
    assert gradient.result(timeout=10).loss == pytest.approx(0.4 + 0.5)
    assert update.result(timeout=10).version == 1
    assert run.version == 1
    assert update.operation_name == f"{RUN}/operations/2"
    assert update.metadata is not None
    assert update.metadata.state == "succeeded"
    assert update.done()


async def test_futures_can_be_awaited_in_any_order(server: FakeServer, data: Data) -> None:
    async with await tinsmith.Client.connect_async(server.address, "tsk_test") as client:
        run = await client.create_lora_training_run_async(base_model="tiny")
        gradient = run.forward_backward(data)
        update = run.optim_step()
        assert (await update).version == 1
        assert (await gradient).loss == pytest.approx(0.9)
        assert (await gradient).loss == pytest.approx(0.9)


def test_calls_are_numbered_in_order_and_do_not_wait(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.update(paused=True)
    futures = [run.forward_backward(data) for _ in range(30)]
    assert [future.sequence_number for future in futures] == list(range(1, 31))
    assert not futures[0].done()
    server.update(paused=False)
    for future in futures:
        future.result(timeout=10)
    assert server.state.executed == list(range(1, 31))


def test_many_requests_are_in_flight(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.state.submit_delay_s = dict.fromkeys(range(1, 21), 0.3)
    futures = [run.forward_backward(data) for _ in range(20)]
    for future in futures:
        future.result(timeout=10)
    assert max(server.state.in_flight) > 1


def test_late_arrivals_execute_in_sequence(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.state.submit_delay_s = {1: 0.4}
    futures = [run.forward_backward(data), run.optim_step(), run.forward_backward(data)]
    for future in futures:
        future.result(timeout=10)
    assert server.state.executed == [1, 2, 3]


def test_a_refused_call_is_sent_again_with_the_same_request_id(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.state.refusals = [unavailable(), unavailable()]
    run.forward_backward(data).result(timeout=10)
    ids = {request.request_id for _, request in server.state.requests}
    assert len(server.state.requests) == 3
    assert len(ids) == 1


def test_a_lost_reply_does_not_double_the_operation(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.state.drop_replies = 2
    futures = [run.forward_backward(data), run.optim_step()]
    for future in futures:
        future.result(timeout=10)
    assert server.state.version == 1
    assert server.state.executed == [1, 2]


def test_a_full_queue_is_retried_only_with_retry_info(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    full = make_status(code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_after_s=0.05)
    server.state.refusals = [full, full]
    run.forward_backward(data).result(timeout=10)
    assert len(server.state.requests) == 3
    server.state.refuse_number = {
        2: make_status(code_pb2.RESOURCE_EXHAUSTED, "BATCH_TOO_LARGE", "too large")
    }
    with pytest.raises(tinsmith.ResourceExhaustedError, match="send the batch in parts"):
        run.forward_backward(data).result(timeout=10)
    assert len(server.state.requests) == 4


def test_a_refusal_is_typed_and_the_run_goes_on(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.state.refuse_number = {1: invalid()}
    bad, good = run.forward_backward(data), run.forward_backward(data)
    with pytest.raises(tinsmith.InvalidArgumentError) as caught:
        bad.result(timeout=10)
    assert caught.value.reason == "SHAPE_MISMATCH"
    assert caught.value.metadata == {"field": "weights"}
    assert caught.value.field_violations[0].field == "weights"
    assert "\n" not in str(caught.value)
    assert good.result(timeout=10).loss > 0
    assert good.sequence_number == 2


def test_a_failed_operation_raises_the_same_type_as_a_failed_call(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.state.fail_operation = {1: invalid()}
    future = run.forward_backward(data)
    assert isinstance(future.exception(timeout=10), tinsmith.InvalidArgumentError)
    with pytest.raises(tinsmith.InvalidArgumentError):
        future.result()


def test_a_timeout_says_what_the_server_waits_for(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.update(paused=True, waiting_for="a free slot of tiny")
    future = run.forward_backward(data)
    with pytest.raises(tinsmith.OperationTimeoutError, match="a free slot of tiny") as caught:
        future.result(timeout=0.5)
    assert isinstance(caught.value, TimeoutError)
    server.update(queue_position=3)
    with pytest.raises(tinsmith.OperationTimeoutError, match="at position 3, a free slot"):
        future.result(timeout=0.5)
    assert future.metadata is not None
    assert future.metadata.queue_position == 3
    server.update(paused=False)
    assert future.result(timeout=10).loss > 0


async def test_cancelling_a_wait_leaves_the_operation(server: FakeServer, data: Data) -> None:
    async with await tinsmith.Client.connect_async(server.address, "tsk_test") as client:
        run = await client.create_lora_training_run_async(base_model="tiny")
        server.update(paused=True)
        future = run.forward_backward(data)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future.result_async(), 0.2)
        server.update(paused=False)
        assert (await future).loss > 0


def test_results_survive_a_restart_at_another_address(data: Data) -> None:
    first = FakeServer()
    trainer = FakeServer(first.state)
    first.state.trainer_address = trainer.address
    with tinsmith.Client(first.address, "tsk_test", retry=FAST) as client:
        run = client.create_lora_training_run(base_model="tiny")
        run.forward_backward(data).result(timeout=10)
        first.update(paused=True)
        num_polls = first.state.calls["WaitOperations"]
        waiting = run.forward_backward(data)
        until(lambda: first.state.calls["forward_backward"] >= 2)
        until(lambda: first.state.calls["WaitOperations"] > num_polls)
        trainer.stop()
        during = run.optim_step()
        num_looks = first.state.calls["GetTrainingRun"]
        until(lambda: first.state.calls["GetTrainingRun"] > num_looks)
        second = FakeServer(first.state)
        first.state.trainer_address = second.address
        second.update(paused=False)
        assert waiting.result(timeout=15).loss > 0
        assert during.result(timeout=15).version == 1
        assert first.state.executed == [1, 2, 3]
    first.stop()
    second.stop()


def test_another_pod_at_the_old_address_is_not_taken_for_the_trainer(data: Data) -> None:
    first = FakeServer()
    trainer = FakeServer(first.state)
    first.state.trainer_address = trainer.address
    stranger = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    with tinsmith.Client(first.address, "tsk_test", retry=FAST) as client:
        run = client.create_lora_training_run(base_model="tiny")
        run.forward_backward(data).result(timeout=10)
        trainer.stop()
        assert stranger.add_insecure_port(trainer.address)
        stranger.start()
        during = run.optim_step()
        with pytest.raises(tinsmith.OperationTimeoutError):
            during.exception(timeout=1.0)
        second = FakeServer(first.state)
        first.state.trainer_address = second.address
        assert during.result(timeout=15).version == 1
    stranger.stop(None)
    first.stop()
    second.stop()


def test_a_result_missing_from_the_list_is_asked_for_alone(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.state.hide_from_list = {1}
    server.update(paused=True)
    future = run.forward_backward(data)
    until(lambda: server.state.calls["WaitOperations"])
    server.update(paused=False)
    assert future.result(timeout=10).loss > 0
    assert server.state.calls["GetOperation"] >= 1


def test_an_undeliverable_operation_fails_all_later_ones(server: FakeServer, data: Data) -> None:
    retry = tinsmith.RetryPolicy(budget_s=0.3, initial_backoff_s=0.02, max_backoff_s=0.05)
    with tinsmith.Client(server.address, "tsk_test", retry=retry) as client:
        run = client.create_lora_training_run(base_model="tiny")
        run.forward_backward(data).result(timeout=10)
        server.state.refusals = [unavailable()] * 1000
        futures = [run.forward_backward(data), run.optim_step()]
        for future in futures:
            with pytest.raises(tinsmith.RunUndeliverableError, match=r"operation 2 .*runs\.get"):
                future.result(timeout=10)
        server.state.refusals = []
        with pytest.raises(tinsmith.RunUndeliverableError):
            run.optim_step().result(timeout=10)
        again = client.runs.get(RUN)
        assert again.forward_backward(data).result(timeout=10).loss > 0


def test_a_continued_run_goes_on_with_the_next_number(
    client: tinsmith.Client, run: tinsmith.TrainingRun, data: Data
) -> None:
    run.forward_backward(data).result(timeout=10)
    run.optim_step().result(timeout=10)
    again = client.runs.get("run-1")
    assert again.version == 1
    gradient, update = again.forward_backward(data), again.optim_step()
    assert gradient.sequence_number == 3
    assert update.result(timeout=10).version == 2


def observed(server: FakeServer) -> list[int]:
    return [
        request.observed_sequence_number
        for kind, request in server.state.requests
        if kind == "optim_step"
    ]


def test_a_pipelined_step_observes_nothing_of_its_own_accumulation(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.update(paused=True)
    run.forward_backward(data)
    update = run.optim_step()
    server.update(paused=False)
    update.result(timeout=10)
    run.forward_backward(data).result(timeout=10)
    run.optim_step().result(timeout=10)
    assert observed(server) == [0, 3]


def test_a_failure_is_observed_once_it_was_looked_at(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.state.fail_operation = {2: invalid()}
    # The answer to a call may be its result, which then comes before those of earlier calls.
    run.forward_backward(data).result(timeout=10)
    bad = run.forward_backward(data)
    run.forward_backward(data).result(timeout=10)
    until(bad.done)
    run.optim_step().result(timeout=10)
    assert observed(server) == [1]
    server.state.fail_operation = {6: invalid()}
    run.forward_backward(data).result(timeout=10)
    bad = run.forward_backward(data)
    assert bad.exception(timeout=10) is not None
    run.optim_step().result(timeout=10)
    # The applied step 4 closed the first accumulation, so its failure is history.
    assert observed(server) == [1, 6]


def test_too_large_a_request_uses_no_number(run: tinsmith.TrainingRun, data: Data) -> None:
    tokens = np.arange(250_000)
    large = tinsmith.Datum(
        tinsmith.ModelInput.from_ints(tokens), {"target_tokens": tokens, "weights": tokens}
    )
    with pytest.raises(tinsmith.ResourceExhaustedError, match="BATCH_TOO_LARGE"):
        run.forward_backward([large] * 36)
    assert run.forward_backward(data).sequence_number == 1


def test_closing_fails_what_is_pending(server: FakeServer, data: Data) -> None:
    with tinsmith.Client(server.address, "tsk_test") as client:
        run = client.create_lora_training_run(base_model="tiny")
        server.update(paused=True)
        future = run.forward_backward(data)
    with pytest.raises(tinsmith.ClientClosedError):
        future.result(timeout=5)
    with pytest.raises(tinsmith.ClientClosedError):
        run.optim_step()


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        pytest.param(lambda datum: datum, r"data is one Datum .*\[datum\]", id="one"),
        pytest.param(lambda datum: [datum, "text"], r"data\[1\] is a str", id="text"),
    ],
)
def test_a_batch_that_is_no_list_of_datums_is_refused(
    server: FakeServer,
    run: tinsmith.TrainingRun,
    data: Data,
    wrap: Callable[[tinsmith.Datum], Any],
    message: str,
) -> None:
    for send in (run.forward, run.forward_backward):
        with pytest.raises(tinsmith.InvalidArgumentError, match=message):
            send(wrap(data[0]))
    assert not server.state.requests
    # Nothing was used up: the run goes on at its first number.
    assert run.forward_backward(data).sequence_number == 1
