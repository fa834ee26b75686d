"""Forks on a ledger that trainers share, after a crash, and with damaged or missing files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.trainer.test_trainer_shared_ledger import release
from tests.fakes.trainer_harness import (
    RunClient,
    TrainerRig,
    make_datum,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.wait import eventually

from tinsmith.v1 import checkpoint_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost

ALWAYS_SNAPSHOT_S = 1e-9
_HAND_OVER = trainer_control_pb2.ReleaseRunRequest.MODE_HAND_OVER
_DAY_S = 24 * 3600.0


async def trained(rig: TrainerRig, num_steps: int) -> tuple[RunClient, dict[int, dict[str, bytes]]]:
    """Return a run of some steps, and its bits after each."""
    run = await rig.new_run()
    bits = {}
    for step in range(1, num_steps + 1):
        await run.step(make_datum(seed=step), make_datum(2500, seed=step))
        bits[step] = await run.bits(f"at-{step}")
    return run, bits


async def test_any_trainer_of_the_ledger_and_store_forks(
    tmp_path: Path, engine_host: EngineHost, postgres_url: str
) -> None:
    store = f"file://{tmp_path / 'store'}"
    async with (
        running_trainer(
            tmp_path / "a",
            engine_host,
            database_url=postgres_url,
            worker_name="a",
            storage_uri=store,
        ) as first,
        running_trainer(
            tmp_path / "b",
            engine_host,
            database_url=postgres_url,
            worker_name="b",
            storage_uri=store,
        ) as second,
    ):
        run, bits = await trained(first, 3)
        held = await second.fork(run, 1, "held-elsewhere")
        await release(first, run, _HAND_OVER)
        free = await second.fork(run, 2, "held-by-none")
        assert await held.bits("a") == bits[1]
        assert await free.bits("a") == bits[2]


async def test_a_run_whose_files_are_in_another_store_is_not_forked(
    tmp_path: Path, engine_host: EngineHost, postgres_url: str
) -> None:
    async with (
        running_trainer(
            tmp_path / "a", engine_host, database_url=postgres_url, worker_name="a"
        ) as near,
        running_trainer(
            tmp_path / "b", engine_host, database_url=postgres_url, worker_name="b"
        ) as far,
    ):
        run, _ = await trained(near, 1)
        refused = await refusal(far.fork(run, 1))
        assert "in another store" in refused.message


def snapshots_of(rig: TrainerRig, run: RunClient) -> list[Path]:
    """Return the folders of the snapshots of a run, oldest first."""
    folders = (rig.config.data_dir / "store" / run.name / "snapshots").iterdir()
    return sorted(folders, key=number_of)


def number_of(snapshot: Path) -> int:
    """Return the last operation that a snapshot contains."""
    return int(snapshot.name.partition("-")[0])


@pytest.fixture
async def rig(tmp_path: Path, engine_host: EngineHost) -> AsyncIterator[TrainerRig]:
    async with running_trainer(
        tmp_path / "data", engine_host, snapshot_replay_s=ALWAYS_SNAPSHOT_S
    ) as rig:
        yield rig


async def test_a_run_and_a_fork_survive_a_kill(rig: TrainerRig) -> None:
    run, bits = await trained(rig, 3)
    early = await rig.fork(run, 2, "early")
    again = await rig.fork(run, 3, "again", reruns_step=True)
    await rig.recover_from(rig.copy_data())
    late = await rig.fork(run, 1, "late")
    assert await early.bits("a") == bits[2]
    assert await again.bits("a") == bits[3]
    assert await late.bits("a") == bits[1]


@pytest.mark.parametrize("num_damaged", [1, 2])
async def test_a_damaged_snapshot_is_passed_over(rig: TrainerRig, num_damaged: int) -> None:
    run, bits = await trained(rig, 3)
    await eventually(lambda: len(snapshots_of(rig, run)) >= 2)
    for folder in snapshots_of(rig, run)[-num_damaged:]:
        (folder / "state.safetensors").write_bytes(b"damaged")
    fork = await rig.fork(run, 3)
    assert await fork.bits("a") == bits[3]


async def test_a_step_whose_requests_expired_is_refused_with_those_that_are_kept(
    rig: TrainerRig,
) -> None:
    run, bits = await trained(rig, 4)
    await rig.sweep(9 * _DAY_S)
    for _ in range(3):
        await rig.sweep()
    refused = await refusal(rig.fork(run, 1, "gone"))
    assert (refused.reason, "it has step" in refused.message) == ("STEP_EXPIRED", True)
    fork = await rig.fork(run, 4, "kept")
    assert await fork.bits("a") == bits[4]


async def test_a_load_is_repeated_as_long_as_its_checkpoint_is_there(rig: TrainerRig) -> None:
    other = await rig.new_run("other")
    await other.step(make_datum(seed=9))
    saved = await other.saved("begin")
    run = await rig.new_run()
    response_of(await run.wait(await run.load(saved.name)), trainer_pb2.LoadCheckpointResponse())
    bits = {}
    through_step_2 = 0
    for step in (2, 3, 4):
        assert await run.step(make_datum(seed=step)) == step
        bits[step] = await run.bits(f"at-{step}")
        through_step_2 = through_step_2 or run.next_number - 1
    # The snapshot that was taken with the load goes with its day.
    rig.passed_s += 2 * _DAY_S
    assert await run.step(make_datum(seed=5)) == 5
    await eventually(lambda: number_of(snapshots_of(rig, run)[0]) > through_step_2)
    repeated = await rig.fork(run, 2, "repeated")
    assert await repeated.bits("a") == bits[2]
    request = checkpoint_pb2.DeleteCheckpointRequest(name=saved.name)
    await other.call("DeleteCheckpoint", request)
    refused = await refusal(rig.fork(run, 2, "gone"))
    assert (refused.reason, "was deleted" in refused.message) == ("STEP_EXPIRED", True)
    late = await rig.fork(run, 4, "late")
    assert await late.bits("a") == bits[4]


async def test_the_past_of_a_day_can_be_forked_from_older_snapshots(rig: TrainerRig) -> None:
    run = await rig.new_run()
    bits = {}
    for step in range(1, 6):
        rig.passed_s += 7 * 3600.0
        await run.step(make_datum(seed=step))
        bits[step] = await run.bits(f"at-{step}")
        # A stop takes the snapshot of what none contains.
        await rig.restart()
    for _ in range(4):
        await rig.sweep(1800.0)
    # The first step is older than the past that is kept; a snapshot may still have it.
    for step in range(2, 6):
        fork = await rig.fork(run, step, f"at-{step}")
        assert await fork.bits("a") == bits[step]
    refused = await refusal(rig.fork(run, 0, "gone"))
    assert refused.reason == "STEP_EXPIRED"
    assert refused.message.endswith(" to 5")
