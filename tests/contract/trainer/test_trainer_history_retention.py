"""The past of a run is kept for as long as the run says, and no longer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.trainer_harness import (
    SCHEDULER,
    RunClient,
    TrainerRig,
    code_of,
    make_datum,
    query_ledger,
    refusal,
    response_of,
    running_trainer,
)

from tinsmith.rpc.durations import encode_duration
from tinsmith.v1 import trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost

ALWAYS_SNAPSHOT_S = 1e-9
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@pytest.fixture
async def rig(tmp_path: Path, engine_host: EngineHost) -> AsyncIterator[TrainerRig]:
    async with running_trainer(
        tmp_path / "data", engine_host, snapshot_replay_s=ALWAYS_SNAPSHOT_S
    ) as rig:
        yield rig


async def trained(run: RunClient) -> dict[int, dict[str, bytes]]:
    """Train four steps, with snapshots of the last two, and return the bits after each."""
    bits = {}
    for step in range(1, 5):
        await run.step(make_datum(seed=step))
        bits[step] = await run.bits(f"at-{step}")
        if step > 2:
            # A stop takes the snapshot of what none contains; others depend on the disk.
            await run.rig.restart()
    return bits


async def set_history(run: RunClient, history_s: float | None, *, epoch: int = 1) -> Any:
    request = trainer_control_pb2.SetHistoryRetentionRequest(
        run=run.name,
        epoch=epoch,
        history_retention=None if history_s is None else encode_duration(history_s),
    )
    return await run.call("SetHistoryRetention", request, metadata=SCHEDULER)


async def pass_days(rig: TrainerRig, num_days: float) -> None:
    """Let days pass, and have what is old enough dropped, also of runs that sleep."""
    await rig.sweep(num_days * DAY_S)
    for _ in range(2):
        await rig.sweep(2 * HOUR_S)


async def reason_of_fork(rig: TrainerRig, run: RunClient, fork_id: str) -> str:
    """Return why the first step of a run cannot be forked."""
    return (await refusal(rig.fork(run, 1, fork_id))).reason


async def test_a_run_of_ten_days_is_forked_and_played_again_after_nine(rig: TrainerRig) -> None:
    long, short = await rig.new_run("long", history_s=10 * DAY_S), await rig.new_run("short")
    bits = await trained(long)
    await trained(short)
    first = await long.wait(1)
    await pass_days(rig, 9)
    await rig.restart()
    await rig.sweep(2 * HOUR_S)
    assert await reason_of_fork(rig, short, "gone") == "STEP_EXPIRED"
    fork = await rig.fork(long, 1, "kept")
    assert await fork.bits("a") == bits[1]
    again = await rig.fork(long, 1, "again", reruns_step=True)
    recorded = await long.wait(1)
    assert recorded.response == first.response, "what a replay is compared with"
    assert (await again.wait(1)).response == recorded.response
    # A fork has the default, however long its source keeps its past.
    rows = query_ledger(
        rig.config.data_dir, "SELECT name, history_retention_s FROM runs ORDER BY name"
    )
    kept = {name.rpartition("/")[2]: history_s for name, history_s in rows}
    assert (kept["long"], kept["short"], kept["kept"]) == (10 * DAY_S, 25 * HOUR_S, 25 * HOUR_S)
    await pass_days(rig, 2)
    assert await reason_of_fork(rig, long, "late") == "STEP_EXPIRED"


async def test_a_run_is_given_more_or_less_time_later(rig: TrainerRig) -> None:
    run = await rig.new_run()
    bits = await trained(run)
    await pass_days(rig, 0.5)
    for _ in range(2):
        await set_history(run, 10 * DAY_S)
    # A trainer that is asked to hold it anew changes nothing of that.
    await rig.adopt(run.name)
    await pass_days(rig, 8)
    fork = await rig.fork(run, 1, "kept")
    assert await fork.bits("a") == bits[1]
    await set_history(run, 25 * HOUR_S)
    await pass_days(rig, 0)
    assert await reason_of_fork(rig, run, "gone") == "STEP_EXPIRED"
    # What is gone does not come back, and what is there stays.
    await set_history(run, 10 * DAY_S)
    assert await reason_of_fork(rig, run, "still-gone") == "STEP_EXPIRED"
    late = await rig.fork(run, 4, "late")
    assert await late.bits("a") == bits[4]
    response_of(await run.wait(await run.forward_backward()), trainer_pb2.ForwardBackwardResponse())


async def test_a_time_that_requests_are_answered_again_for_is_kept_in_any_case(
    rig: TrainerRig,
) -> None:
    name = "projects/p/trainingRuns/never"
    refused = await refusal(rig.adopt(name, history_s=24 * HOUR_S))
    assert (refused.reason, "at least 25 h" in refused.message) == ("INVALID_FIELD", True)
    run = await rig.new_run()
    for history_s in (24 * HOUR_S, -1.0, None):
        assert (await refusal(set_history(run, history_s))).reason == "INVALID_FIELD"
    assert code_of(await refusal(set_history(run, 2 * DAY_S, epoch=2))) == "ABORTED"
    missing = RunClient(rig, name, "")
    assert (await refusal(set_history(missing, 2 * DAY_S))).reason == "RUN_NOT_FOUND"
    request = trainer_control_pb2.SetHistoryRetentionRequest(run=run.name, epoch=1)
    assert code_of(await refusal(run.call("SetHistoryRetention", request))) == "PERMISSION_DENIED"
    assert not rig.failed
