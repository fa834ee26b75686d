"""A client that goes on where another one was cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.rpc import code_pb2
from tests.fakes.sdk_fake_server import RUN, FakeServer, make_status, unavailable
from tests.support.wait import until
from tests.unit.sdk.conftest import FAST

import tinsmith

Data = list[tinsmith.Datum]
SESSION = "projects/default/sessions/s1"


@pytest.fixture
def lost(
    server: FakeServer, client: tinsmith.Client, run: tinsmith.TrainingRun, data: Data
) -> Iterator[tinsmith.Client]:
    """A client that trained a step, sent another one, and is not heard of again."""
    run.forward_backward(data).result(timeout=10)
    run.optim_step().result(timeout=10)
    server.update(paused=True)
    run.forward_backward(data)
    run.optim_step()
    until(lambda: len(server.state.operations) == 4)
    yield client
    server.update(paused=False)


@pytest.fixture
def resumed(server: FakeServer, lost: tinsmith.Client) -> Iterator[tinsmith.Client]:
    with tinsmith.Client(server.address, "tsk_test", retry=FAST, session=lost.session) as client:
        yield client


def test_a_session_is_resumed_and_not_created(
    server: FakeServer, lost: tinsmith.Client, resumed: tinsmith.Client
) -> None:
    assert lost.session == SESSION
    assert resumed.session == SESSION
    assert lost.resumed_runs == []
    assert server.state.calls["CreateSession"] == 1
    assert server.state.last["ResumeSession"].session == SESSION


async def test_pending_results_are_collected_and_the_run_goes_on(
    server: FakeServer, resumed: tinsmith.Client, data: Data
) -> None:
    [run] = resumed.resumed_runs
    assert run.version == 1
    gradient, update = run.pending_operations
    assert [(f.sequence_number, f.kind) for f in (gradient, update)] == [
        (3, "forward_backward"),
        (4, "optim_step"),
    ]
    next_gradient = run.forward_backward(data)
    assert not gradient.done()
    server.update(paused=False)
    first, second = await gradient, await update
    assert isinstance(first, tinsmith.ForwardBackwardOutput)
    assert first.loss > 0
    assert isinstance(second, tinsmith.OptimStepResponse)
    assert (second.version, run.version) == (2, 2)
    assert next_gradient.sequence_number == 5
    assert (await run.optim_step()).version == 3
    # What had ended before is not sent again.
    assert server.state.calls["WaitOperation"] <= 2


def test_a_step_after_a_resume_observes_only_what_its_caller_can_know(
    server: FakeServer, resumed: tinsmith.Client, data: Data
) -> None:
    failure = make_status(code_pb2.FAILED_PRECONDITION, "NON_FINITE_LOSS", "NaN")
    [run] = resumed.resumed_runs
    run.optim_step()
    until(lambda: 5 in server.state.operations)
    server.update(paused=False, fail_operation={3: failure, 4: failure})
    gradient, update = run.pending_operations
    assert isinstance(gradient.exception(timeout=10), tinsmith.FailedPreconditionError)
    assert isinstance(update.exception(timeout=10), tinsmith.FailedPreconditionError)
    run.optim_step().result(timeout=10)
    observed = [
        request.observed_sequence_number
        for kind, request in server.state.requests
        if kind == "optim_step"
    ]
    assert observed[-2:] == [2, 5]


def test_the_id_of_a_session_is_enough(server: FakeServer, lost: tinsmith.Client) -> None:
    with tinsmith.Client(server.address, "tsk_test", retry=FAST, session="s1") as client:
        assert client.session == SESSION


def test_a_run_whose_trainer_is_away_is_waited_for(
    server: FakeServer, lost: tinsmith.Client
) -> None:
    server.state.fail_calls["ResumeSession"] = [unavailable()] * 2
    with tinsmith.Client(server.address, "tsk_test", retry=FAST, session=SESSION) as client:
        assert [run.name for run in client.resumed_runs] == [RUN]


def test_a_session_that_was_finished_is_refused(server: FakeServer) -> None:
    refusal = make_status(code_pb2.FAILED_PRECONDITION, "SESSION_FINISHED", "it was finished")
    server.state.fail_calls["ResumeSession"] = [refusal]
    with pytest.raises(tinsmith.FailedPreconditionError, match="SESSION_FINISHED"):
        tinsmith.Client(server.address, "tsk_test", retry=FAST, session=SESSION)
    assert server.state.calls["FinishSession"] == 0


def test_a_run_taken_by_name_offers_what_waits(
    server: FakeServer, lost: tinsmith.Client, data: Data
) -> None:
    with tinsmith.Client(server.address, "tsk_test", retry=FAST) as client:
        run = client.runs.get("run-1")
        assert [future.sequence_number for future in run.pending_operations] == [3, 4]
        server.update(paused=False)
        assert [bool(f.result(timeout=10)) for f in run.pending_operations] == [True, True]
        assert run.forward_backward(data).sequence_number == 5


def test_closing_fails_what_was_taken_over(server: FakeServer, lost: tinsmith.Client) -> None:
    client = tinsmith.Client(server.address, "tsk_test", retry=FAST, session=SESSION)
    [run] = client.resumed_runs
    futures = [*run.pending_operations, run.operation(3)]
    client.close()
    for future in futures:
        with pytest.raises(tinsmith.ClientClosedError):
            future.result(timeout=10)


# Earlier operations.


def test_any_earlier_operation_is_decoded_by_its_type(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    run.forward(data)
    run.forward_backward(data)
    run.optim_step()
    run.save_state("a").result(timeout=10)
    run.load_state("a").result(timeout=10)
    found = [run.operation(number).result(timeout=10) for number in range(1, 6)]
    assert [type(result) for result in found] == [
        tinsmith.ForwardBackwardOutput,
        tinsmith.ForwardBackwardOutput,
        tinsmith.OptimStepResponse,
        tinsmith.Checkpoint,
        tinsmith.LoadWeightsResponse,
    ]
    assert run.version == 0
    future = run.operation(3)
    future.result(timeout=10)
    assert (future.kind, future.sequence_number) == ("optim_step", 3)
    assert run.version == 0  # An earlier step says nothing of the present weights.


async def test_an_operation_that_waits_is_waited_for(
    server: FakeServer, resumed: tinsmith.Client
) -> None:
    [run] = resumed.resumed_runs
    future = run.operation(4)
    server.update(paused=False)
    result = await future
    assert isinstance(result, tinsmith.OptimStepResponse)
    assert result.version == 2


def test_what_never_was_differs_from_what_has_expired(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    run.forward_backward(data).result(timeout=10)
    server.update(expired={1})
    with pytest.raises(tinsmith.FailedPreconditionError, match="OPERATION_EXPIRED") as expired:
        run.operation(1).result(timeout=10)
    assert "do not send it again" in str(expired.value)
    with pytest.raises(tinsmith.NotFoundError, match="OPERATION_NOT_FOUND"):
        run.operation(7).result(timeout=10)
    assert run.optim_step().result(timeout=10).version == 1


def test_a_failed_operation_is_found_with_its_error(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    server.state.fail_operation[1] = make_status(
        code_pb2.FAILED_PRECONDITION, "NON_FINITE_LOSS", "NaN"
    )
    run.forward_backward(data).exception(timeout=10)
    with pytest.raises(tinsmith.FailedPreconditionError, match="NON_FINITE_LOSS"):
        run.operation(1).result(timeout=10)


# Trainers that do not answer.


def test_a_run_is_found_whose_trainer_stopped_answering(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    silence = make_status(code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "no answer")
    server.state.fail_calls["forward_backward"] = [silence] * 1000
    elsewhere = FakeServer()
    try:
        server.update(trainer_address=elsewhere.address)
        assert run.forward_backward(data).result(timeout=10).loss > 0
        assert elsewhere.state.calls["forward_backward"] == 1
    finally:
        elsewhere.stop()
