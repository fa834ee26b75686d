"""Whether the training of a run is done: said by its client, undone by a step or by reopening."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from tests.fakes.scheduler_fake_trainer import (
    Metadata,
    Rig,
    bearer,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import keys_pb2, run_metrics_pb2, scheduler_pb2, trainer_pb2

ACTIVITIES = scheduler_pb2.TrainingRun.Activity
TRAINER = pod("trainer")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, max_metrics_per_run=1) as rig:
        await rig.register()
        yield rig


@pytest.fixture
async def owner(rig: Rig) -> Metadata:
    return await rig.user("default")


@pytest.fixture
async def run(rig: Rig, owner: Metadata) -> scheduler_pb2.TrainingRun:
    return await rig.create_run(owner, await rig.session(owner))


async def finish(
    rig: Rig, who: Metadata, run: str, sequence_number: int | None = 8
) -> scheduler_pb2.TrainingRun:
    request = scheduler_pb2.FinishTrainingRunRequest(run=run, sequence_number=sequence_number)
    answer: scheduler_pb2.TrainingRun = await rig.stub.FinishTrainingRun(
        request, metadata=who, timeout=60
    )
    return answer


async def reopen(rig: Rig, who: Metadata, run: str, session: str) -> scheduler_pb2.TrainingRun:
    request = scheduler_pb2.ReopenTrainingRunRequest(run=run, session=session)
    answer: scheduler_pb2.TrainingRun = await rig.stub.ReopenTrainingRun(
        request, metadata=who, timeout=60
    )
    return answer


async def end_session(rig: Rig, who: Metadata, session: str) -> None:
    request = scheduler_pb2.FinishSessionRequest(session=session)
    await rig.stub.FinishSession(request, metadata=who, timeout=60)


async def record_step(
    rig: Rig, who: Metadata, run: str, sequence_number: int, name: str = "trainer/loss"
) -> None:
    request = run_metrics_pb2.RecordRunMetricsRequest(run=run)
    request.records.add(step=3, metrics={name: 1.0}, sequence_number=sequence_number)
    await rig.run_metrics.RecordRunMetrics(request, metadata=who, timeout=60)


async def activity(rig: Rig, who: Metadata) -> str:
    """Return what a list says of the only run."""
    request = scheduler_pb2.ListTrainingRunsRequest(parent="projects/default")
    answer = await rig.stub.ListTrainingRuns(request, metadata=who, timeout=60)
    [found] = answer.training_runs
    assert found.HasField("finish_time") or found.activity != ACTIVITIES.ACTIVITY_FINISHED
    return ACTIVITIES.Name(found.activity).removeprefix("ACTIVITY_").lower()


async def events_of(rig: Rig, run: str) -> list[str]:
    request = scheduler_pb2.ListAuditEventsRequest(parent="projects/default")
    answer = await rig.stub.ListAuditEvents(request, metadata=rig.admin, timeout=60)
    return sorted(each.action for each in answer.events if each.resource == run)


async def test_a_run_trains_until_its_client_has_gone(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun
) -> None:
    assert not run.HasField("finish_time")
    assert await activity(rig, owner) == "training"
    await end_session(rig, owner, run.session)
    assert await activity(rig, owner) == "idle"


async def test_a_finished_run_is_finished_with_and_without_its_client(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun
) -> None:
    finished = await finish(rig, owner, run.name)
    assert finished.state == scheduler_pb2.TrainingRun.STATE_ACTIVE
    assert finished.HasField("finish_time")
    assert await activity(rig, owner) == "finished"
    await end_session(rig, owner, run.session)
    assert await activity(rig, owner) == "finished"
    await rig.restart()
    assert (await rig.get_run(owner, run.name)).finish_time == finished.finish_time


async def test_a_repeated_finish_changes_nothing(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun
) -> None:
    first = await finish(rig, owner, run.name)
    assert await finish(rig, owner, run.name) == first
    assert await events_of(rig, run.name) == ["create_run", "finish_run"]
    # Another end is said anew.
    again = await finish(rig, owner, run.name, 9)
    assert again.finish_time.ToNanoseconds() > first.finish_time.ToNanoseconds()


@pytest.mark.parametrize(("waiting_for", "expected"), [("", "training"), ("a slot", "waiting")])
async def test_operations_are_shown_before_what_was_said(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun, waiting_for: str, expected: str
) -> None:
    await finish(rig, owner, run.name)
    rig.trainer.statuses[run.name] = trainer_pb2.RunStatus(
        run=run.name, num_pending_operations=1, waiting_for=waiting_for
    )
    assert await activity(rig, owner) == expected
    # Such as a score: it was no step, and the run is finished again.
    rig.trainer.statuses.clear()
    assert await activity(rig, owner) == "finished"


async def test_a_later_step_undoes_a_finish_and_an_earlier_one_does_not(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun
) -> None:
    await finish(rig, owner, run.name, 8)
    await record_step(rig, TRAINER, run.name, 8)
    assert await activity(rig, owner) == "finished"
    await record_step(rig, TRAINER, run.name, 9)
    assert await activity(rig, owner) == "training"
    await end_session(rig, owner, run.session)
    assert await activity(rig, owner) == "idle"


async def test_a_step_counts_where_its_metrics_have_no_room(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun
) -> None:
    await record_step(rig, TRAINER, run.name, 7)
    await finish(rig, owner, run.name, 8)
    with expect_rpc_error(StatusCode.RESOURCE_EXHAUSTED, reason="LIMIT_EXCEEDED"):
        await record_step(rig, TRAINER, run.name, 9, "trainer/entropy")
    assert await activity(rig, owner) == "training"


async def test_a_client_reports_no_steps_of_trainers(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun
) -> None:
    await finish(rig, owner, run.name, 8)
    for who, number in ((owner, 9), (TRAINER, -1)):
        with expect_rpc_error(StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD"):
            await record_step(rig, who, run.name, number, "loss")
    # What a client logs of a finished run, such as a score, is no step.
    await record_step(rig, owner, run.name, 0, "loss")
    assert await activity(rig, owner) == "finished"


async def test_a_reopened_run_trains_for_as_long_as_its_new_session_lives(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun
) -> None:
    await finish(rig, owner, run.name)
    await end_session(rig, owner, run.session)
    session = await rig.session(owner)
    for _ in range(2):
        reopened = await reopen(rig, owner, run.name, session)
        assert not reopened.HasField("finish_time")
        # The session of its creation is what it was.
        assert reopened.session == run.session
    assert await activity(rig, owner) == "training"
    await rig.restart()
    assert await activity(rig, owner) == "training"
    assert await events_of(rig, run.name) == ["create_run", "finish_run", "reopen_run"]
    await end_session(rig, owner, session)
    assert await activity(rig, owner) == "idle"
    with expect_rpc_error(StatusCode.FAILED_PRECONDITION, reason="SESSION_FINISHED"):
        await reopen(rig, owner, run.name, session)


async def test_a_run_that_takes_no_operations_has_no_activity(rig: Rig, owner: Metadata) -> None:
    session = await rig.session(owner)
    rig.trainer.gate.clear()
    operation = await rig.begin_run(owner, session)
    name = operation.name.partition("/operations/")[0]
    assert await activity(rig, owner) == "unspecified"
    for call in (finish(rig, owner, name), reopen(rig, owner, name, session)):
        with expect_rpc_error(StatusCode.FAILED_PRECONDITION, reason="WRONG_STATE"):
            await call
    rig.trainer.gate.set()
    await rig.wait(owner, operation.name)
    await finish(rig, owner, name)


@pytest.mark.parametrize("sequence_number", [None, -1])
async def test_a_finish_names_the_last_operation(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun, sequence_number: int | None
) -> None:
    with expect_rpc_error(StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await finish(rig, owner, run.name, sequence_number)
    # A training of no operations may be done too.
    assert (await finish(rig, owner, run.name, 0)).HasField("finish_time")


async def test_no_run_and_no_session_of_others_is_touched(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun
) -> None:
    stranger = await rig.user("other")
    theirs = await rig.session(stranger, "other")
    calls: list[tuple[Any, str]] = [
        (finish(rig, stranger, run.name), "RUN_NOT_FOUND"),
        (reopen(rig, stranger, run.name, theirs), "RUN_NOT_FOUND"),
        (reopen(rig, owner, run.name, theirs), "SESSION_NOT_FOUND"),
        (reopen(rig, owner, run.name, f"{run.session}-none"), "SESSION_NOT_FOUND"),
        (finish(rig, owner, f"{run.name}-none"), "RUN_NOT_FOUND"),
    ]
    for call, reason in calls:
        with expect_rpc_error(StatusCode.NOT_FOUND, reason=reason):
            await call
    request = keys_pb2.CreateKeyRequest(
        parent="projects/default", request_id=new_id(), role="viewer"
    )
    key = await rig.key_stub.CreateKey(request, metadata=rig.admin, timeout=60)
    with expect_rpc_error(StatusCode.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await finish(rig, bearer(key.secret), run.name)
    assert await activity(rig, owner) == "training"


async def test_a_deleted_run_is_neither_finished_nor_reopened(
    rig: Rig, owner: Metadata, run: scheduler_pb2.TrainingRun
) -> None:
    await rig.delete_run(owner, run.name)
    for call in (finish(rig, owner, run.name), reopen(rig, owner, run.name, run.session)):
        with expect_rpc_error(StatusCode.NOT_FOUND, reason="RUN_NOT_FOUND"):
            await call
