from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.longrunning import operations_pb2
from tests.fakes.scheduler_fake_trainer import (
    FakeTrainer,
    Rig,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.metrics import metric
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import models_pb2, scheduler_pb2, trainer_pb2
from tinsmith_runtime.errors import (
    AbortedError,
    CapacityExhaustedError,
    InvalidFieldError,
    UnavailableError,
)

Code = grpc.StatusCode
TrainingRun = scheduler_pb2.TrainingRun


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url, max_runs_per_project=5) as rig:
        yield rig


@pytest.fixture
async def other_trainer() -> AsyncIterator[FakeTrainer]:
    trainer = FakeTrainer()  # type: ignore[abstract]
    await trainer.server.start()
    yield trainer
    await trainer.server.stop()


def waiting_for(operation: operations_pb2.Operation) -> str:
    metadata = scheduler_pb2.CreateTrainingRunMetadata()
    assert operation.metadata.Unpack(metadata)
    return metadata.waiting_for


def run_of(operation: operations_pb2.Operation) -> str:
    return str(operation.name).removesuffix("/operations/create")


async def test_run_is_placed_and_read(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    operation = await rig.begin_run(rig.admin, session, display_name="mine", labels={"a": "b"})
    assert not operation.done
    assert waiting_for(operation)
    operation = await rig.wait(rig.admin, operation.name)
    run = TrainingRun()
    assert operation.response.Unpack(run)
    assert run.state == TrainingRun.STATE_ACTIVE
    assert (run.epoch, run.session, run.base_model) == (1, session, "tiny")
    assert run.trainer_address == rig.trainer.server.address
    assert run.adapter.lora.rank == 32
    assert run.adapter.lora.train_attention
    assert rig.trainer.adopted[run.name].adapter == run.adapter
    assert await rig.get_run(rig.admin, run.name) == run
    assert await rig.get_run(pod("gateway"), run.name) == run
    # A new session of the project may use the run; a trainer that is not alive has no address.
    await rig.advance(20, keep=())
    assert (await rig.get_run(rig.admin, run.name)).trainer_address == ""
    await rig.restart()
    assert (await rig.get_run(rig.admin, run.name)).state == TrainingRun.STATE_ACTIVE
    await rig.register(address="elsewhere:1")
    assert (await rig.get_run(rig.admin, run.name)).trainer_address == "elsewhere:1"


async def test_create_is_answered_once(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    identity = new_id()
    operations = await asyncio.gather(
        *(rig.begin_run(rig.admin, session, request_id=identity) for _ in range(3))
    )
    assert len({operation.name for operation in operations}) == 1
    await rig.wait(rig.admin, operations[0].name)
    # Even after the session has ended and the model is gone.
    await rig.stub.FinishSession(
        scheduler_pb2.FinishSessionRequest(session=session), metadata=rig.admin
    )
    await rig.restart()
    again = await rig.begin_run(rig.admin, session, request_id=identity)
    assert again.name == operations[0].name
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await rig.begin_run(rig.admin, session, request_id=identity, display_name="other")
    assert len(rig.trainer.adopted) == 1


async def test_a_chosen_id_is_used_once(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    fields = {"training_run_id": "ses-1:train:0".replace(":", "."), "request_id": new_id()}
    first, repeat = await asyncio.gather(
        *(rig.begin_run(rig.admin, session, **fields) for _ in range(2))
    )
    assert first == repeat
    assert run_of(first) == "projects/default/trainingRuns/ses-1.train.0"
    await rig.wait(rig.admin, first.name)
    assert len(rig.trainer.adopt_calls) == 1
    for _ in range(2):
        with expect_rpc_error(Code.ALREADY_EXISTS, reason="RESOURCE_ALREADY_EXISTS") as errors:
            await rig.begin_run(rig.admin, session, training_run_id="ses-1.train.0")
        assert errors[0].metadata["run"] == run_of(first)
        # Its files and its ledger would be found by a new run of this name.
        await rig.delete_run(rig.admin, run_of(first))
        await rig.restart()
        await rig.register()
    assert (await rig.begin_run(rig.admin, session, **fields)).name == first.name
    # Another project has its own ids.
    user = await rig.user("b")
    other = await rig.session(user, "b")
    await rig.create_run(user, other, training_run_id="ses-1.train.0")


async def test_of_clients_that_choose_one_id_at_once_one_wins(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    rig.trainer.gate.clear()
    answers = await asyncio.gather(
        *(rig.begin_run(rig.admin, session, training_run_id="mine") for _ in range(4)),
        return_exceptions=True,
    )
    won = [answer for answer in answers if isinstance(answer, operations_pb2.Operation)]
    lost = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert len(won) == 1
    assert {error.code() for error in lost} == {Code.ALREADY_EXISTS}
    # The creation that goes on is still waited for, and not made twice.
    waiting = asyncio.create_task(rig.wait(rig.admin, won[0].name))
    await eventually(lambda: len(rig.trainer.adopt_calls) == 1)
    assert not waiting.done()
    rig.trainer.gate.set()
    assert (await waiting).done
    assert len(rig.trainer.adopt_calls) == 1


async def test_a_run_of_bad_fields_is_refused(rig: Rig) -> None:
    """Which are bad is in `test_scheduler_codec` and `test_runtime_requests`."""
    session = await rig.session(rig.admin)
    adapter = models_pb2.AdapterConfig(lora=models_pb2.LoraConfig(rank=129))
    for fields in ({"training_run_id": "a/b"}, {"adapter": adapter}):
        with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD") as errors:
            await rig.begin_run(rig.admin, session, **fields)
        assert errors[0].metadata["field"].startswith(next(iter(fields)))


async def test_unknown_session_and_model(rig: Rig) -> None:
    session = await rig.session(rig.admin)
    with expect_rpc_error(Code.NOT_FOUND, reason="MODEL_NOT_FOUND"):
        await rig.begin_run(rig.admin, session)
    with expect_rpc_error(Code.NOT_FOUND, reason="SESSION_NOT_FOUND"):
        await rig.begin_run(rig.admin, "projects/default/sessions/none")
    await rig.stub.FinishSession(
        scheduler_pb2.FinishSessionRequest(session=session), metadata=rig.admin
    )
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="SESSION_FINISHED"):
        await rig.begin_run(rig.admin, session)


async def test_project_limit_counts_living_runs(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    runs = [await rig.create_run(rig.admin, session) for _ in range(5)]
    with expect_rpc_error(Code.RESOURCE_EXHAUSTED, reason="LIMIT_EXCEEDED"):
        await rig.begin_run(rig.admin, session)
    await rig.delete_run(rig.admin, runs[0].name)
    await rig.create_run(rig.admin, session)


async def test_runs_of_ended_sessions_take_no_place(rig: Rig) -> None:
    await rig.register(max_runs=5)
    for _ in range(4):
        session = await rig.session(rig.admin)
        for _ in range(5):
            await rig.create_run(rig.admin, session)
        finish = scheduler_pb2.FinishSessionRequest(session=session)
        await rig.stub.FinishSession(finish, metadata=rig.admin, timeout=60)


async def test_full_trainers_make_a_run_wait_and_then_fail(rig: Rig) -> None:
    await rig.register(max_runs=1)
    session = await rig.session(rig.admin)
    first = await rig.create_run(rig.admin, session)
    waiting = await rig.begin_run(rig.admin, session)
    late = await rig.begin_run(rig.admin, session)
    operation = await rig.wait(rig.admin, waiting.name, wait_s=0)
    assert not operation.done
    await eventually(lambda: _waits_for(rig, waiting.name, "1 places"))
    await rig.delete_run(rig.admin, first.name)
    operations = [waiting, late]
    await eventually(lambda: len(rig.trainer.adopted) == 1)
    for _ in range(2):
        # Runs of an ended session would take no place.
        heartbeat = scheduler_pb2.HeartbeatSessionRequest(session=session)
        await rig.stub.HeartbeatSession(heartbeat, metadata=rig.admin, timeout=60)
        await rig.advance(31)
    done = [await rig.wait(rig.admin, operation.name) for operation in operations]
    assert sorted(operation.WhichOneof("result") for operation in done) == ["error", "response"]
    failed = next(operation for operation in done if operation.HasField("error"))
    error = decode_status(failed.error)
    assert (failed.error.code, error.reason) == (8, "CAPACITY_EXHAUSTED")
    run = await rig.get_run(rig.admin, run_of(failed))
    assert run.state == TrainingRun.STATE_FAILED


async def _waits_for(rig: Rig, name: str, words: str) -> bool:
    request = operations_pb2.GetOperationRequest(name=name)
    return words in waiting_for(await rig.operations.GetOperation(request, metadata=rig.admin))


async def test_trainer_that_refuses_is_passed_over(rig: Rig, other_trainer: FakeTrainer) -> None:
    await rig.register()
    await rig.register(name="trainer-1", address=other_trainer.server.address)
    rig.trainer.adopt_errors = [CapacityExhaustedError("full")]
    session = await rig.session(rig.admin)
    run = await rig.create_run(rig.admin, session)
    assert run.trainer_address == other_trainer.server.address
    assert run.epoch == 2
    assert list(other_trainer.adopted) == [run.name]


async def test_runs_are_spread_over_trainers(rig: Rig, other_trainer: FakeTrainer) -> None:
    await rig.register()
    await rig.register(name="trainer-1", address=other_trainer.server.address)
    session = await rig.session(rig.admin)
    operations = [await rig.begin_run(rig.admin, session) for _ in range(4)]
    for operation in operations:
        await rig.wait(rig.admin, operation.name)
    assert (len(rig.trainer.adopted), len(other_trainer.adopted)) == (2, 2)


async def test_lost_answer_is_asked_for_again_under_the_same_epoch(rig: Rig) -> None:
    await rig.register()
    rig.trainer.adopt_errors = [UnavailableError("lost"), UnavailableError("lost")]
    run = await rig.create_run(rig.admin, await rig.session(rig.admin))
    assert [call.epoch for call in rig.trainer.adopt_calls] == [1, 1, 1]
    assert run.epoch == 1


async def test_higher_epoch_is_overtaken(rig: Rig) -> None:
    await rig.register()
    rig.trainer.adopt_errors = [AbortedError("held under a higher epoch")]
    run = await rig.create_run(rig.admin, await rig.session(rig.admin))
    assert run.epoch > 1


async def test_run_that_is_refused_for_good_fails_at_once(rig: Rig) -> None:
    await rig.register()
    rig.trainer.adopt_errors = [InvalidFieldError("adapter.full", "is not supported here")]
    session = await rig.session(rig.admin)
    adapter = models_pb2.AdapterConfig(full=models_pb2.FullParameterConfig())
    operation = await rig.begin_run(rig.admin, session, adapter=adapter)
    operation = await rig.wait(rig.admin, operation.name)
    error = decode_status(operation.error)
    assert (operation.error.code, error.reason) == (3, "INVALID_FIELD")
    await rig.restart()
    request = operations_pb2.GetOperationRequest(name=operation.name)
    assert await rig.operations.GetOperation(request, metadata=rig.admin) == operation


async def test_trainer_that_stays_away_fails_the_run_and_owes_its_removal(rig: Rig) -> None:
    await rig.register()
    rig.trainer.adopt_errors = [UnavailableError("lost")] * 10_000
    session = await rig.session(rig.admin)
    operation = await rig.begin_run(rig.admin, session)
    await eventually(lambda: len(rig.trainer.adopt_calls) > 1)
    # The trainer adopted the run, its answer was lost, and then it was gone.
    rig.trainer.adopted[run_of(operation)] = rig.trainer.adopt_calls[0]
    await rig.advance(61, keep=())
    operation = await rig.wait(rig.admin, operation.name)
    assert decode_status(operation.error).reason == "WORKER_UNAVAILABLE"
    assert operation.error.code == 14
    assert rig.trainer.deleted == []
    await rig.register()
    await eventually(lambda: rig.trainer.deleted == [run_of(operation)])


async def test_creation_goes_on_after_a_restart(rig: Rig) -> None:
    await rig.register()
    rig.trainer.gate.clear()
    session = await rig.session(rig.admin)
    operation = await rig.begin_run(rig.admin, session)
    await eventually(lambda: len(rig.trainer.adopt_calls) == 1)
    await rig.restart()
    # The trainer has not registered yet.
    stands = await rig.wait(rig.admin, operation.name, wait_s=0)
    assert not stands.done
    await rig.register()
    rig.trainer.gate.set()
    operation = await rig.wait(rig.admin, operation.name)
    assert operation.WhichOneof("result") == "response"
    assert {call.epoch for call in rig.trainer.adopt_calls} == {1}


async def test_model_is_known_after_a_restart_before_its_trainer_is_back(rig: Rig) -> None:
    await rig.register()
    await rig.restart()
    session = await rig.session(rig.admin)
    operation = await rig.begin_run(rig.admin, session)
    assert not (await rig.wait(rig.admin, operation.name, wait_s=0)).done
    await rig.register()
    assert (await rig.wait(rig.admin, operation.name)).done


async def test_delete_leaves_a_tombstone(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    run = await rig.create_run(rig.admin, session)
    for _ in range(2):
        deleted = await rig.delete_run(rig.admin, run.name)
        assert deleted.state == TrainingRun.STATE_DELETED
        assert deleted.trainer_address == ""
    assert rig.trainer.deleted == [run.name]
    with expect_rpc_error(Code.NOT_FOUND, reason="RUN_NOT_FOUND"):
        await rig.get_run(rig.admin, run.name)
    request = scheduler_pb2.ListTrainingRunsRequest(parent="projects/default")
    assert not (await rig.stub.ListTrainingRuns(request, metadata=rig.admin)).training_runs
    operation = await rig.wait(rig.admin, f"{run.name}/operations/create")
    assert decode_status(operation.error).reason == "RUN_CLOSED"
    with expect_rpc_error(Code.NOT_FOUND, reason="RUN_NOT_FOUND"):
        await rig.delete_run(rig.admin, "projects/default/trainingRuns/run-0")


async def test_delete_needs_the_trainer(rig: Rig) -> None:
    await rig.register()
    run = await rig.create_run(rig.admin, await rig.session(rig.admin))
    await rig.advance(20, keep=())
    with expect_rpc_error(Code.UNAVAILABLE, reason="WORKER_UNAVAILABLE") as error:
        await rig.delete_run(rig.admin, run.name)
    assert error[0].retry_after_s
    await rig.register()
    # The trainer had deleted it, and its answer was lost.
    rig.trainer.adopted.clear()
    assert (await rig.delete_run(rig.admin, run.name)).state == TrainingRun.STATE_DELETED


async def test_delete_while_creating(rig: Rig) -> None:
    await rig.register()
    rig.trainer.gate.clear()
    operation = await rig.begin_run(rig.admin, await rig.session(rig.admin))
    await eventually(lambda: len(rig.trainer.adopt_calls) == 1)
    deleted = await rig.delete_run(rig.admin, run_of(operation))
    assert deleted.state == TrainingRun.STATE_DELETED
    rig.trainer.gate.set()
    operation = await rig.wait(rig.admin, operation.name)
    assert decode_status(operation.error).reason == "RUN_CLOSED"
    await eventually(lambda: rig.trainer.deleted == [run_of(operation)])
    assert rig.trainer.adopted == {}


async def test_list_in_pages_newest_first(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    names = [(await rig.create_run(rig.admin, session)).name for _ in range(5)]
    request = scheduler_pb2.ListTrainingRunsRequest(parent="projects/default", page_size=2)
    found = []
    while True:
        answer = await rig.stub.ListTrainingRuns(request, metadata=rig.admin)
        assert len(answer.training_runs) <= 2
        found += [run.name for run in answer.training_runs]
        if not answer.next_page_token:
            break
        request.page_token = answer.next_page_token
    assert found == names[::-1]
    other = await rig.user("b")
    request.parent = "projects/b"
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.stub.ListTrainingRuns(request, metadata=other)
    for page_size, token in ((-1, ""), (1001, ""), (1, "nonsense")):
        wrong = scheduler_pb2.ListTrainingRunsRequest(
            parent="projects/default", page_size=page_size, page_token=token
        )
        with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
            await rig.stub.ListTrainingRuns(wrong, metadata=rig.admin)


async def test_foreign_runs_look_missing(rig: Rig) -> None:
    await rig.register()
    run = await rig.create_run(rig.admin, await rig.session(rig.admin))
    other = await rig.user("b")
    missing = "projects/default/trainingRuns/run-000000000000"
    for call in (rig.get_run, rig.delete_run):
        with expect_rpc_error(Code.NOT_FOUND, reason="RUN_NOT_FOUND") as foreign:
            await call(other, run.name)
        with expect_rpc_error(Code.NOT_FOUND, reason="RUN_NOT_FOUND") as absent:
            await call(rig.admin, missing)
        assert foreign[0].message.replace(run.name, "") == absent[0].message.replace(missing, "")
    for method in ("GetOperation", "WaitOperation"):
        request = getattr(operations_pb2, f"{method}Request")(name=f"{run.name}/operations/create")
        with expect_rpc_error(Code.NOT_FOUND, reason="OPERATION_NOT_FOUND"):
            await getattr(rig.operations, method)(request, metadata=other)
    with expect_rpc_error(Code.NOT_FOUND, reason="RESOURCE_NOT_FOUND"):
        await rig.stub.ListTrainingRuns(
            scheduler_pb2.ListTrainingRunsRequest(parent="projects/default"), metadata=other
        )
    assert rig.trainer.deleted == []


async def test_other_operations_are_refused_with_a_reason(rig: Rig) -> None:
    name = "projects/default/trainingRuns/run-0/operations/1"
    with expect_rpc_error(Code.NOT_FOUND, reason="OPERATION_NOT_FOUND"):
        await rig.operations.GetOperation(
            operations_pb2.GetOperationRequest(name=name), metadata=rig.admin
        )
    for method in ("ListOperations", "CancelOperation", "DeleteOperation"):
        request = getattr(operations_pb2, f"{method}Request")(name=name)
        with expect_rpc_error(Code.FAILED_PRECONDITION, reason="WRONG_STATE"):
            await getattr(rig.operations, method)(request, metadata=rig.admin)


async def test_stop_lets_waiting_clients_go(rig: Rig) -> None:
    await rig.register()
    rig.trainer.gate.clear()
    operation = await rig.begin_run(rig.admin, await rig.session(rig.admin))
    waiting = asyncio.create_task(rig.wait(rig.admin, operation.name, wait_s=20))
    await eventually(lambda: len(rig.trainer.adopt_calls) == 1)
    method = "/google.longrunning.Operations/WaitOperation"
    await eventually(lambda: metric("tinsmith_rpc_in_flight", method=method) == 1)
    async with asyncio.timeout(5):
        await rig.pod.stop()
        assert not (await waiting).done
    await rig.start()


async def listed(rig: Rig) -> list[scheduler_pb2.TrainingRun]:
    request = scheduler_pb2.ListTrainingRunsRequest(parent="projects/default")
    answer = await rig.stub.ListTrainingRuns(request, metadata=rig.admin, timeout=10)
    return list(answer.training_runs)


async def test_a_list_says_what_goes_on_in_a_run_and_who_is_there(rig: Rig) -> None:
    await rig.register()
    session, other = await rig.session(rig.admin), await rig.session(rig.admin)
    idle = await rig.create_run(rig.admin, other)
    busy = await rig.create_run(rig.admin, session)
    rig.trainer.statuses[busy.name] = trainer_pb2.RunStatus(
        run=busy.name, num_pending_operations=17, waiting_for="its turn on the engine"
    )
    first, second = await listed(rig)
    assert (first.name, first.worker) == (busy.name, "workers/trainer-0")
    assert (first.num_pending_operations, first.waiting_for) == (17, "its turn on the engine")
    assert (second.name, second.num_pending_operations, second.waiting_for) == (idle.name, 0, "")
    assert not first.session_ended
    # Two runs on one trainer are one question.
    assert rig.trainer.list_calls == ["projects/default/trainingRuns/-"]
    await rig.stub.FinishSession(
        scheduler_pb2.FinishSessionRequest(session=session), metadata=rig.admin
    )
    assert [run.session_ended for run in await listed(rig)] == [True, False]


async def test_a_trainer_that_does_not_answer_holds_up_no_list(rig: Rig) -> None:
    await rig.register()
    run = await rig.create_run(rig.admin, await rig.session(rig.admin))
    rig.trainer.list_gate.clear()
    [found] = await listed(rig)
    rig.trainer.list_gate.set()
    assert (found.name, found.num_pending_operations) == (run.name, 0)
    await rig.register(address="127.0.0.1:1")
    assert [run.name for run in await listed(rig)] == [run.name]
