"""How long the past of a run is kept: said at its creation, changed later, told to its trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from tests.fakes.scheduler_fake_trainer import Metadata, Rig, expect_rpc_error, running_rig

from tinsmith.rpc.durations import encode_duration
from tinsmith.v1 import scheduler_pb2
from tinsmith_runtime.errors import AbortedError, DrainingError

HOUR_S = 3600
DAY_S = 24 * HOUR_S


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path) as rig:
        await rig.register()
        yield rig


@pytest.fixture
async def owner(rig: Rig) -> Metadata:
    return await rig.user("default")


async def new_run(rig: Rig, who: Metadata, history_s: float | None = None, **fields: Any) -> Any:
    if history_s is not None:
        fields["history_retention"] = encode_duration(history_s)
    return await rig.create_run(who, await rig.session(who), **fields)


async def update(
    rig: Rig, who: Metadata, name: str, history_s: float, paths: tuple[str, ...] | None = None
) -> scheduler_pb2.TrainingRun:
    request = scheduler_pb2.UpdateTrainingRunRequest(
        name=name, history_retention=encode_duration(history_s)
    )
    request.update_mask.paths.extend(("history_retention",) if paths is None else paths)
    answer: scheduler_pb2.TrainingRun = await rig.stub.UpdateTrainingRun(
        request, metadata=who, timeout=5
    )
    return answer


async def updates_of(rig: Rig, name: str) -> int:
    """Count the events that a run was updated."""
    request = scheduler_pb2.ListAuditEventsRequest(parent="projects/default")
    answer = await rig.stub.ListAuditEvents(request, metadata=rig.admin, timeout=60)
    return [(each.action, each.resource) for each in answer.events].count(("update_run", name))


async def test_a_run_is_created_with_the_time_for_which_its_past_is_kept(
    rig: Rig, owner: Metadata
) -> None:
    plain = await new_run(rig, owner)
    assert plain.history_retention.ToSeconds() == 25 * HOUR_S
    run = await new_run(rig, owner, 90 * DAY_S)
    assert run.history_retention.ToSeconds() == 90 * DAY_S
    asked = [call.history_retention.ToSeconds() for call in rig.trainer.adopt_calls]
    assert asked == [25 * HOUR_S, 90 * DAY_S]
    fork = await new_run(rig, owner, base_model="", source_run=run.name, source_step=0)
    assert fork.history_retention.ToSeconds() == 25 * HOUR_S


@pytest.mark.parametrize("history_s", [24 * HOUR_S, 90 * DAY_S + 1, -1.0])
async def test_a_time_out_of_range_is_refused(rig: Rig, owner: Metadata, history_s: float) -> None:
    run = await new_run(rig, owner)
    for call in (
        rig.begin_run(
            owner, await rig.session(owner), history_retention=encode_duration(history_s)
        ),
        update(rig, owner, run.name, history_s),
    ):
        with expect_rpc_error(StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD") as found:
            await call
        assert "at least 25 h, at most 2160 h" in found[0].message
    assert rig.trainer.history_calls == []


async def test_a_change_is_told_to_the_ledger_and_noted_once(rig: Rig, owner: Metadata) -> None:
    run = await new_run(rig, owner)
    for _ in range(2):
        changed = await update(rig, owner, run.name, 30 * DAY_S)
        assert changed.history_retention.ToSeconds() == 30 * DAY_S
    told = rig.trainer.history_calls
    assert {(call.run, call.epoch) for call in told} == {(run.name, run.epoch)}
    assert {call.history_retention.ToSeconds() for call in told} == {30 * DAY_S}
    assert await updates_of(rig, run.name) == 1
    await rig.restart()
    assert (await rig.get_run(owner, run.name)).history_retention.ToSeconds() == 30 * DAY_S


async def test_what_the_ledger_was_not_told_is_not_said(rig: Rig, owner: Metadata) -> None:
    run = await new_run(rig, owner)
    for problem in (DrainingError("shutting down"), AbortedError("held under epoch 9, not 1")):
        rig.trainer.history_errors = [problem]
        with expect_rpc_error(StatusCode.UNAVAILABLE, reason="WORKER_UNAVAILABLE"):
            await update(rig, owner, run.name, 30 * DAY_S)
        found = await rig.get_run(owner, run.name)
        assert found.history_retention.ToSeconds() == 25 * HOUR_S
    assert await updates_of(rig, run.name) == 0


async def test_nothing_else_is_changed_and_no_run_of_others(rig: Rig, owner: Metadata) -> None:
    run = await new_run(rig, owner)
    for paths in ((), ("display_name",), ("history_retention", "labels")):
        with expect_rpc_error(StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD"):
            await update(rig, owner, run.name, 30 * DAY_S, paths)
    stranger = await rig.user("other")
    for who, name in ((stranger, run.name), (owner, f"{run.name}-none")):
        with expect_rpc_error(StatusCode.NOT_FOUND, reason="RUN_NOT_FOUND"):
            await update(rig, who, name, 30 * DAY_S)
    await rig.delete_run(owner, run.name)
    with expect_rpc_error(StatusCode.NOT_FOUND, reason="RUN_NOT_FOUND"):
        await update(rig, owner, run.name, 30 * DAY_S)
