"""How long results, requests and rows live, and that a replay does not miss what is gone."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from google.longrunning import operations_pb2
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    code_of,
    edit_ledger,
    error_of,
    make_datum,
    new_id,
    query_ledger,
    refusal,
    response_of,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import trainer_control_pb2, trainer_pb2

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
ALWAYS_SNAPSHOT_S = 1e-9
LARGE = [make_datum(num_tokens=2500, seed=seed) for seed in range(2)]
EXPIRED = ("FAILED_PRECONDITION", "OPERATION_EXPIRED")


async def fate(run: RunClient, number: int) -> tuple[str, str] | str:
    """Return `kept`, or the code and reason with which an operation is not there."""
    try:
        await run.get(number)
    except Exception:
        error = await refusal(run.get(number))
        return code_of(error), error.reason
    return "kept"


async def listed(run: RunClient) -> list[str]:
    answer = await run.rig.operations.ListOperations(
        operations_pb2.ListOperationsRequest(name=run.name), metadata=run.metadata
    )
    return [operation.name.rpartition("/")[2] for operation in answer.operations]


async def ended(run: RunClient, number: int) -> None:
    """Return once nothing waits, without getting a result."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await run.status()).num_pending_operations:
            await asyncio.sleep(0.01)
    assert (await run.status()).next_sequence_number == number


# Results.


async def test_results_are_kept_a_day_after_they_were_got_and_a_week_otherwise(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run()
    request_id = new_id()
    await run.forward_backward(make_datum(), request_id=request_id)
    await run.optim_step()
    await ended(run, 3)
    await rig.sweep()
    await rig.sweep(2 * DAY_S)
    await run.get(1)
    await run.forward_backward(make_datum(seed=1), number=4)  # waits for 3
    await rig.sweep(DAY_S - HOUR_S)
    await rig.sweep(2 * HOUR_S)
    assert await fate(run, 1) == EXPIRED
    error = await refusal(run.wait(1))
    assert (code_of(error), error.reason) == EXPIRED
    assert await listed(run) == ["2", "4"]
    # It was listed a moment ago, so that the week does not count.
    await rig.sweep(DAY_S + HOUR_S)
    assert await fate(run, 2) == EXPIRED
    await rig.sweep(400 * DAY_S)
    assert await fate(run, 4) == "kept"
    assert await fate(run, 5) == ("NOT_FOUND", "OPERATION_NOT_FOUND")
    error = await refusal(run.forward_backward(make_datum(), number=1, request_id=request_id))
    assert (code_of(error), error.reason) == EXPIRED
    error = await refusal(run.forward_backward(make_datum(), number=1))
    assert error.reason == "SEQUENCE_NUMBER_REUSED"
    await run.forward_backward(make_datum(seed=1), number=3)
    response_of(await run.wait(4), trainer_pb2.ForwardBackwardResponse())


async def test_an_unretrieved_result_is_dropped_after_a_week(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.forward_backward(make_datum())
    await run.forward_backward(make_datum(), loss="cross_entropy", method="Forward")
    await ended(run, 3)
    await rig.sweep()
    await rig.sweep(7 * DAY_S - HOUR_S)
    assert query_ledger(rig.config.data_dir, "SELECT count(*) FROM operations WHERE result IS NULL")
    rows = "SELECT count(*) FROM operations WHERE result IS NOT NULL"
    assert query_ledger(rig.config.data_dir, rows) == [(2,)]
    await rig.sweep(2 * HOUR_S)
    assert query_ledger(rig.config.data_dir, rows) == [(0,)]
    # The rows stay: there is no snapshot, and a replay needs them.
    assert query_ledger(rig.config.data_dir, "SELECT count(payload) FROM operations") == [(2,)]


async def test_reading_costs_no_write_and_a_lost_note_keeps_longer(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.wait(await run.forward_backward(make_datum()))
    noted = "SELECT retrieve_time_s IS NOT NULL FROM operations"
    assert query_ledger(rig.config.data_dir, noted) == [(0,)]
    left_behind = rig.copy_data()
    await rig.sweep()
    assert query_ledger(rig.config.data_dir, noted) == [(1,)]
    rig.passed_s += 7 * DAY_S - HOUR_S
    await rig.recover_from(left_behind)
    # A client may have got it from the process before, a moment before that died.
    await rig.sweep(2 * HOUR_S)
    assert query_ledger(rig.config.data_dir, "SELECT count(result) FROM operations") == [(1,)]
    await rig.sweep(DAY_S)
    assert query_ledger(rig.config.data_dir, "SELECT count(result) FROM operations") == [(0,)]


async def test_a_stop_writes_the_notes_down(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.wait(await run.forward_backward(make_datum()))
    await rig.restart()
    noted = "SELECT retrieve_time_s IS NOT NULL FROM operations"
    assert query_ledger(rig.config.data_dir, noted) == [(1,)]


# Rows and replay.


@pytest.mark.parametrize("is_tampered", [False, True], ids=["same-bits", "other-digest"])
async def test_a_replay_after_everything_expired_gives_the_same_bits(
    rig: TrainerRig, is_tampered: bool
) -> None:
    undisturbed = await rig.new_run("undisturbed")
    for number in range(5):
        await undisturbed.step(make_datum(seed=number))
    wanted = await undisturbed.bits("final")
    run = await rig.new_run()
    for number in range(3):
        await run.step(make_datum(seed=number))
        await rig.restart()  # a trainer that ends leaves a snapshot
    await run.step(make_datum(seed=3))
    await rig.sweep()
    await rig.sweep(30 * DAY_S)
    [(lowest, num_results)] = query_ledger(
        rig.config.data_dir,
        "SELECT min(sequence_number), count(result) FROM operations WHERE run = ?",
        run.name,
    )
    assert lowest > 3
    assert num_results == 0
    left_behind = rig.copy_data()
    if is_tampered:
        edit_ledger(
            left_behind,
            "UPDATE operations SET result_digest = x'00' WHERE kind = 'optim_step' AND run = ?",
            run.name,
        )
    await rig.recover_from(left_behind)
    assert (await run.status()).next_sequence_number == run.next_number
    await run.step(make_datum(seed=4))
    assert await run.bits("final") == wanted
    assert (await run.status()).replay_diverged is is_tampered
    assert await fate(run, lowest - 1) == EXPIRED
    assert await fate(run, 1) == EXPIRED
    assert code_of(await refusal(run.get(run.next_number))) == "NOT_FOUND"
    error = await refusal(run.forward_backward(make_datum(), number=1))
    assert (code_of(error), error.reason) == ("ABORTED", "SEQUENCE_NUMBER_REUSED")
    assert not rig.failed


async def test_without_a_snapshot_that_can_be_read_a_run_is_not_replayed_in_part(
    rig: TrainerRig,
) -> None:
    await rig.restart(snapshot_replay_s=ALWAYS_SNAPSHOT_S)
    run = await rig.new_run()
    for number in range(3):
        await run.step(make_datum(seed=number))
        await run.saved(f"after-{number}")
    await rig.sweep()
    await rig.sweep(30 * DAY_S)
    left_behind = rig.copy_data()
    for path in (left_behind / "store" / run.name / "snapshots").rglob("*.safetensors"):
        path.write_bytes(b"damaged")
    await rig.recover_from(left_behind)
    await run.forward_backward(make_datum())
    operation = await run.wait(run.next_number - 1)
    assert error_of(operation).code.name == "DATA_LOSS"


# Files of requests.


def payload_files(rig: TrainerRig, run: RunClient) -> list[Path]:
    return sorted((rig.config.data_dir / "store" / run.name / "payloads").glob("*"))


async def test_stored_requests_go_when_no_operation_names_them(rig: TrainerRig) -> None:
    await rig.restart(snapshot_replay_s=ALWAYS_SNAPSHOT_S)
    run = await rig.new_run()
    for number in range(3):
        await run.step(*LARGE)
        await run.saved(f"after-{number}")
    assert len(payload_files(rig, run)) == 3
    # The number is taken, and the request had been stored by then.
    assert (await refusal(run.forward_backward(*LARGE, number=1))).reason == (
        "SEQUENCE_NUMBER_REUSED"
    )
    assert len(payload_files(rig, run)) == 4
    await rig.sweep()
    await rig.sweep(HOUR_S / 2)
    assert len(payload_files(rig, run)) == 4
    await rig.sweep(HOUR_S)
    assert len(payload_files(rig, run)) == 3
    # Two snapshots contain the first two, and the time to repeat them is over.
    await rig.sweep(2 * DAY_S)
    [newest] = payload_files(rig, run)
    os.utime(newest, (time.time() + rig.passed_s, time.time() + rig.passed_s))
    await rig.sweep(HOUR_S / 2)
    assert payload_files(rig, run) == [newest]
    assert not rig.failed


async def test_a_request_that_is_being_accepted_keeps_its_file(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await rig.sweep()
    left_over = rig.config.data_dir / "store" / run.name / "payloads"
    with rig.engine_held():
        calls = [asyncio.create_task(run.forward_backward(*LARGE)) for _ in range(8)]
        for _ in range(4):
            await rig.sweep(2 * HOUR_S)
        await asyncio.gather(*calls)
        await rig.sweep(2 * HOUR_S)
        assert len(list(left_over.glob("*"))) == 8
    for number in range(1, 9):
        response_of(await run.wait(number), trainer_pb2.ForwardBackwardResponse())


# Clients that are gone.


async def test_a_resumed_run_gives_up_what_never_arrived_and_goes_on_behind_it(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run()
    with rig.engine_held():
        await run.forward_backward(make_datum(), number=1)
        await run.forward_backward(make_datum(), number=3)
        await run.optim_step(number=4)
        status = await run.resume()
        pending = [(each.sequence_number, each.kind) for each in status.pending_operations]
        assert pending == [(1, "forward_backward"), (3, "forward_backward"), (4, "optim_step")]
        assert status.next_sequence_number == 5
        await run.forward_backward(make_datum(seed=1), number=5)
        await run.optim_step(number=6, observed=4)
        assert (await run.resume()).next_sequence_number == 7
    response_of(await run.wait(1), trainer_pb2.ForwardBackwardResponse())
    for number in (3, 4):
        assert error_of(await run.wait(number)).reason == "SEQUENCE_GAP"
    response_of(await run.wait(5), trainer_pb2.ForwardBackwardResponse())
    assert response_of(await run.wait(6), trainer_pb2.OptimStepResponse()).version == 1
    status = await run.status()
    assert (status.next_sequence_number, list(status.pending_operations)) == (7, [])
    # 1, 2 (given up), 3, 4, 5, 6.
    assert status.latest_revision == 6


async def test_only_pods_resume_runs(rig: TrainerRig) -> None:
    run = await rig.new_run()
    request = trainer_control_pb2.ResumeRunRequest(run=run.name)
    assert code_of(await refusal(run.call("ResumeRun", request))) == "PERMISSION_DENIED"
    missing: Any = trainer_control_pb2.ResumeRunRequest(run="projects/p/trainingRuns/none")
    assert (
        await refusal(run.call("ResumeRun", missing, metadata=pod("scheduler")))
    ).reason == "RUN_NOT_FOUND"
