"""What a restart, a full disk and a lack of places must not change: results and bits."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    code_of,
    edit_ledger,
    error_of,
    logprobs_of,
    make_datum,
    metadata_of,
    query_ledger,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import ErrorCode

ALWAYS_SNAPSHOT_S = 1e-9
State = trainer_pb2.OperationMetadata
LARGE = [make_datum(num_tokens=2500, seed=seed) for seed in range(2)]
"""A batch that is too large to be stored in the ledger itself."""


async def train(run: RunClient, first: int, last: int) -> None:
    """Two batches and a step for each number, every batch another one."""
    for number in range(first, last):
        await run.forward_backward(make_datum(seed=2 * number))
        await run.forward_backward(make_datum(seed=2 * number + 1, num_tokens=11))
        done = await run.wait(await run.optim_step())
        assert response_of(done, trainer_pb2.OptimStepResponse()).version == number + 1


async def undisturbed_bits(rig: TrainerRig, num_steps: int) -> dict[str, bytes]:
    run = await rig.new_run("undisturbed")
    await train(run, 0, num_steps)
    return await run.bits("final")


# Restarts.


async def test_results_outlive_a_restart_and_training_goes_on_with_the_same_bits(
    rig: TrainerRig,
) -> None:
    wanted = await undisturbed_bits(rig, 4)
    run = await rig.new_run()
    await train(run, 0, 2)
    before = [await run.get(number) for number in range(1, 7)]
    await rig.restart()
    assert [await run.get(number) for number in range(1, 7)] == before
    request = trainer_pb2.WaitOperationsRequest(run=run.name)
    answer = await run.call("WaitOperations", request)
    assert list(answer.operations) == before
    status = await run.status()
    assert (status.version, status.next_sequence_number, status.resident) == (2, 7, False)
    await train(run, 2, 4)
    assert await run.bits("final") == wanted
    assert not (await run.status()).replay_diverged


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="replay-of-everything"),
        pytest.param({"snapshot_replay_s": ALWAYS_SNAPSHOT_S}, id="from-a-snapshot"),
    ],
)
async def test_after_a_kill_the_bits_are_those_of_an_undisturbed_run(
    rig: TrainerRig, settings: dict[str, Any]
) -> None:
    wanted = await undisturbed_bits(rig, 3)
    await rig.restart(**settings)
    run = await rig.new_run()
    await train(run, 0, 2)
    # An accumulation is open: its gradient has to come back as well.
    done = await run.wait(await run.forward_backward(make_datum(seed=4)))
    await run.saved("quiet")  # the snapshot that may be due is written before it
    left_behind = rig.copy_data()
    await rig.recover_from(left_behind)
    assert logprobs_of(await run.get(7)) == logprobs_of(done)
    assert (await run.status()).version == 2
    await run.forward_backward(make_datum(seed=5, num_tokens=11))
    await run.wait(await run.optim_step())
    assert await run.bits("final") == wanted
    assert not (await run.status()).replay_diverged
    snapshots = left_behind / "store" / run.name / "snapshots"
    assert snapshots.exists() == bool(settings)


async def test_unfinished_operations_are_executed_after_a_kill(rig: TrainerRig) -> None:
    wanted = await undisturbed_bits(rig, 2)
    run = await rig.new_run()
    await train(run, 0, 1)
    with rig.engine_held():
        await run.forward_backward(make_datum(seed=2))
        await run.forward_backward(make_datum(seed=3, num_tokens=11))
        await run.optim_step()
        left_behind = rig.copy_data()
    await rig.recover_from(left_behind)
    done = await run.wait(6)
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 2
    assert await run.bits("final") == wanted


async def test_held_operations_and_refused_numbers_outlive_a_kill(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.optim_step(number=4, observed=2)
    await refusal(run.forward_backward(number=2, loss="mse"))
    await rig.recover_from(rig.copy_data())
    assert metadata_of(await run.get(4)).state == State.STATE_HELD
    assert error_of(await run.get(2)).reason == "UNKNOWN_LOSS"
    await run.forward_backward(number=1)
    await run.forward_backward(number=3)
    done = await run.wait(4)
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 1


async def test_failures_of_an_open_accumulation_outlive_a_kill(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.wait(await run.forward_backward())
    await refusal(run.forward_backward(loss="mse"))
    await rig.recover_from(rig.copy_data())
    error = error_of(await run.wait(await run.optim_step()))
    assert (error.reason, error.metadata["failed"]) == ("GRADIENT_INCOMPLETE", "2")
    # The cleared gradient stays cleared.
    await rig.recover_from(rig.copy_data())
    assert error_of(await run.wait(await run.optim_step())).reason == "NO_GRADIENT"


async def test_a_refused_step_is_replayed_as_having_changed_nothing(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.wait(await run.forward_backward())
    await refusal(run.optim_step(beta1=7.0))
    await run.wait(await run.optim_step(observed=2))
    before = await run.bits("before")
    await rig.recover_from(rig.copy_data())
    assert await run.bits("after") == before
    assert not (await run.status()).replay_diverged


async def test_a_run_that_came_back_knows_its_gap_failures(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with running_trainer(tmp_path / "data", engine_host, gap_timeout_s=0.1) as rig:
        run = await rig.new_run()
        await train(run, 0, 1)
        await run.wait(await run.forward_backward(number=4))
        await run.wait(await run.optim_step(number=6))  # fails with the gap before it
        assert (await run.status()).version == 1
        before = await run.bits("before")
        await rig.recover_from(rig.copy_data())
        assert (await run.status()).version == 1
        assert await run.bits("after") == before
        # The step that failed ended the accumulation of number 4.
        assert error_of(await run.wait(await run.optim_step())).reason == "NO_GRADIENT"


async def test_a_large_request_goes_through_the_store(rig: TrainerRig) -> None:
    wanted = await rig.new_run("undisturbed")
    await wanted.step(*LARGE)
    run = await rig.new_run()
    with rig.engine_held():
        await run.forward_backward(*LARGE)
        await run.optim_step()
        left_behind = rig.copy_data()
    assert list((left_behind / "store" / run.name / "payloads").iterdir())
    # Once executed after a kill, once replayed after another.
    for _ in range(2):
        await rig.recover_from(left_behind)
        await run.wait(2)
        left_behind = rig.copy_data()
    assert await run.bits("final") == await wanted.bits("final")


# Places.


async def test_runs_that_take_turns_in_one_place_have_the_bits_of_a_run_alone(
    rig: TrainerRig,
) -> None:
    wanted = await undisturbed_bits(rig, 3)
    await rig.restart(max_resident_runs=1)
    runs = [await rig.new_run(f"turn-{index}") for index in range(2)]
    for number in range(3):
        for run in runs:
            await run.forward_backward(make_datum(seed=2 * number))
            await run.wait(run.next_number - 1)
        for run in runs:
            await run.forward_backward(make_datum(seed=2 * number + 1, num_tokens=11))
            await run.wait(await run.optim_step())
    for run in runs:
        assert await run.bits("final") == wanted
    capabilities = await runs[0].call(
        "GetCapabilities", trainer_pb2.TrainerServiceGetCapabilitiesRequest()
    )
    assert capabilities.num_resident_runs == 1


async def test_runs_that_all_wait_share_one_place(rig: TrainerRig) -> None:
    await rig.restart(max_resident_runs=1)
    runs = [await rig.new_run(f"turn-{index}") for index in range(2)]
    with rig.engine_held():
        for run in runs:
            for _ in range(2):
                await run.forward_backward()
                await run.optim_step()
    for run in runs:
        done = await run.wait(4)
        assert response_of(done, trainer_pb2.OptimStepResponse()).version == 2
    assert await runs[0].bits("final") == await runs[1].bits("final")


async def test_more_runs_than_allowed_are_refused(rig: TrainerRig) -> None:
    await rig.restart(max_runs=1)
    await rig.new_run("one")
    error = await refusal(rig.new_run("two"))
    assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "CAPACITY_EXHAUSTED")


# Full disks.


async def test_a_full_disk_refuses_before_the_acknowledgement(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.step()
    large = make_datum(num_tokens=2000)
    assert large.ByteSize() < 64 * 1024
    rig.limit_ledger(spare_pages=2)
    error = await refusal(run.forward_backward(large, number=3))
    assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "STORAGE_FULL")
    assert error.retry_after_s is not None
    assert "free space" in error.message
    assert (await run.status()).next_sequence_number == 3
    rig.limit_ledger(spare_pages=None)
    done = await run.wait(await run.forward_backward(large, number=3))
    assert logprobs_of(done)


async def test_what_was_acknowledged_waits_for_space_and_says_so(rig: TrainerRig) -> None:
    plain = await rig.new_run("plain")
    data = [make_datum(num_tokens=1000, seed=seed) for seed in range(2)]
    await plain.step(*data)
    run = await rig.new_run()
    with rig.engine_held():
        await run.forward_backward(*data)
        await run.optim_step()
        rig.limit_ledger(spare_pages=0)
    async with asyncio.timeout(TIMEOUT_S):
        while "space" not in (await run.status()).waiting_for:
            await asyncio.sleep(0.01)
    assert not (await run.get(1)).done
    rig.limit_ledger(spare_pages=None)
    done = await run.wait(2)
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 1
    assert await run.bits("final") == await plain.bits("final")


async def test_a_pod_stops_while_its_disk_is_full_and_loses_nothing(rig: TrainerRig) -> None:
    plain = await rig.new_run("plain")
    data = [make_datum(num_tokens=1000, seed=seed) for seed in range(2)]
    await plain.step(*data)
    wanted = await plain.bits("final")
    run = await rig.new_run()
    with rig.engine_held():
        await run.forward_backward(*data)
        await run.optim_step()
        rig.limit_ledger(spare_pages=0)
    async with asyncio.timeout(TIMEOUT_S):
        while "space" not in (await run.status()).waiting_for:
            await asyncio.sleep(0.01)
        await rig.restart()
    await run.wait(2)
    assert await run.bits("final") == wanted


async def test_a_full_store_fails_the_save_and_nothing_else(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    await run.step()
    fill_store(rig, monkeypatch)
    error = error_of(await run.wait(await run.save("a")))
    assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "STORAGE_FULL")
    assert error.retry_after_s is not None
    assert await run.step() == 2
    monkeypatch.undo()
    assert (await run.saved("a")).version == 2


async def test_a_full_store_does_not_keep_others_out_of_the_place(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = await undisturbed_bits(rig, 2)
    await rig.restart(max_resident_runs=1, snapshot_replay_s=ALWAYS_SNAPSHOT_S)
    first, second = await rig.new_run("first"), await rig.new_run("second")
    await train(first, 0, 1)
    fill_store(rig, monkeypatch)
    await train(second, 0, 1)
    await train(first, 1, 2)
    monkeypatch.undo()
    assert await first.bits("final") == wanted


def fill_store(rig: TrainerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each write to the store fail as on a full disk."""

    def no_room(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", no_room)


# Poison.


async def test_an_operation_that_killed_the_trainer_again_and_again_fails(
    rig: TrainerRig,
) -> None:
    run, other = await rig.new_run(), await rig.new_run("other")
    await train(run, 0, 1)
    with rig.engine_held():
        await run.forward_backward()
        await run.optim_step()
        await other.forward_backward()
        left_behind = rig.copy_data()
    edit_ledger(
        left_behind,
        "UPDATE operations SET num_attempts = 3 WHERE run = ? AND sequence_number = 4",
        run.name,
    )
    await rig.recover_from(left_behind)
    poison = await run.wait(4)
    error = error_of(poison)
    assert (code_of(error), error.reason) == ("ABORTED", "POISON_OPERATION")
    assert error.metadata["sequence_number"] == "4"
    assert metadata_of(poison).num_attempts == 3
    # The step behind it lacks its gradient; the neighbour has nothing to do with it.
    assert error_of(await run.wait(5)).reason == "GRADIENT_INCOMPLETE"
    assert (await other.wait(1)).HasField("response")
    assert (await run.status()).version == 1
    assert await run.step() == 2
    before = await run.bits("before")
    await rig.recover_from(rig.copy_data())
    assert await run.bits("after") == before


async def test_attempts_are_counted_before_the_operation_is_tried_again(rig: TrainerRig) -> None:
    run = await rig.new_run()
    with rig.engine_held():
        await run.forward_backward()
        await run.optim_step()
        async with asyncio.timeout(TIMEOUT_S):
            while query_ledger(
                rig.config.data_dir, "SELECT num_attempts FROM operations WHERE sequence_number = 1"
            ) != [(1,)]:
                await asyncio.sleep(0.005)
        left_behind = rig.copy_data()
    await rig.recover_from(left_behind)
    assert metadata_of(await run.wait(1)).num_attempts == 2
    done = await run.wait(2)
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 1


# Fences.


async def test_a_trainer_that_lost_a_run_commits_nothing_and_stops(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.step()
    with rig.engine_held():
        await run.forward_backward()
        edit_ledger(rig.config.data_dir, "UPDATE leases SET epoch = 9 WHERE run = ?", run.name)
    await eventually(lambda: rig.fenced)
    assert not (await run.get(3)).done


async def test_a_trainer_that_lost_a_run_accepts_nothing_and_stops(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.step()
    edit_ledger(rig.config.data_dir, "UPDATE leases SET epoch = 9 WHERE run = ?", run.name)
    wrong = make_datum(weights=np.full(6, np.nan, np.float32))
    for datum in (make_datum(), wrong):
        error = await refusal(run.forward_backward(datum))
        assert (error.code, error.reason) == (ErrorCode.UNAVAILABLE, "RUN_MOVED")
    assert len(rig.fenced) == 2


async def test_payload_files_of_a_deleted_run_are_removed(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.wait(await run.forward_backward(*LARGE))
    folder = rig.config.data_dir / "store" / run.name
    assert folder.exists()
    request = trainer_control_pb2.ReleaseRunRequest(
        run=run.name, epoch=1, mode=trainer_control_pb2.ReleaseRunRequest.MODE_DELETE
    )
    await rig.stub.ReleaseRun(request, metadata=pod("scheduler"), timeout=TIMEOUT_S)
    await eventually(lambda: not folder.exists())
