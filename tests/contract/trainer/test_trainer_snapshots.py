"""Snapshots: damage falls back to an older one or to replay, and replay of other bits is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    edit_ledger,
    error_of,
    make_datum,
    query_ledger,
    response_of,
    running_trainer,
)

from tinsmith.v1 import trainer_pb2
from tinsmith_engine.host import EngineHost

ALWAYS_SNAPSHOT_S = 1e-9


LARGE = [make_datum(num_tokens=2500, seed=seed) for seed in range(2)]


async def train(run: RunClient, first: int, last: int) -> None:
    """Two batches and a step for each number, every batch another one."""
    for number in range(first, last):
        await run.forward_backward(make_datum(seed=2 * number))
        await run.forward_backward(make_datum(seed=2 * number + 1, num_tokens=11))
        done = await run.wait(await run.optim_step())
        assert response_of(done, trainer_pb2.OptimStepResponse()).version == number + 1


async def snapshot_folders(rig: TrainerRig, run: RunClient) -> list[Path]:
    """Return the folders of the snapshots that count, newest first."""
    rows = query_ledger(
        rig.config.data_dir,
        "SELECT folder FROM snapshots WHERE run = ? ORDER BY sequence_number DESC",
        run.name,
    )
    return [rig.config.data_dir / "store" / folder for (folder,) in rows]


@pytest.mark.parametrize("num_damaged", [0, 1, 2])
async def test_a_damaged_snapshot_falls_back_to_an_older_one_or_to_replay(
    tmp_path: Path, engine_host: EngineHost, num_damaged: int
) -> None:
    data_dir = tmp_path / "data"
    async with running_trainer(data_dir, engine_host, snapshot_replay_s=ALWAYS_SNAPSHOT_S) as rig:
        run = await rig.new_run()
        await train(run, 0, 3)
        wanted = await run.bits("before")
        assert len(await snapshot_folders(rig, run)) >= 2
        left_behind = rig.copy_data()
        await rig.restart(data_dir=left_behind)
        folders = await snapshot_folders(rig, run)
        for folder in folders[:num_damaged]:
            (folder / "state.safetensors").write_bytes(b"damaged")
        assert await run.bits("after") == wanted
        assert not (await run.status()).replay_diverged


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
async def test_a_flipped_byte_anywhere_in_a_snapshot_is_found(
    tmp_path: Path, engine_host: EngineHost, file: str
) -> None:
    random = np.random.default_rng(len(file))
    data_dir = tmp_path / "data"
    async with running_trainer(data_dir, engine_host, snapshot_replay_s=ALWAYS_SNAPSHOT_S) as rig:
        run = await rig.new_run()
        await train(run, 0, 3)
        wanted = await run.bits("before")
        for attempt in range(4):
            left_behind = rig.copy_data()
            await rig.restart(data_dir=left_behind)
            [newest, *_] = await snapshot_folders(rig, run)
            content = bytearray((newest / file).read_bytes())
            content[random.integers(len(content))] ^= 1 << int(random.integers(8))
            (newest / file).write_bytes(content)
            assert await run.bits(f"after-{attempt}") == wanted
            assert not (await run.status()).replay_diverged


async def test_a_flipped_byte_in_a_stored_request_is_found(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.step()
    with rig.engine_held():
        await run.forward_backward(*LARGE)
        left_behind = rig.copy_data()
    [payload] = (left_behind / "store" / run.name / "payloads").iterdir()
    content = bytearray(payload.read_bytes())
    content[len(content) // 2] ^= 4
    payload.write_bytes(content)
    await rig.recover_from(left_behind)
    assert error_of(await run.wait(await run.get(3))).reason == "DATA_LOSS"
    # What is right goes on, on the weights that were acknowledged.
    assert await run.step() == 2


async def test_old_snapshots_are_deleted(tmp_path: Path, engine_host: EngineHost) -> None:
    async with running_trainer(
        tmp_path / "data", engine_host, snapshot_replay_s=ALWAYS_SNAPSHOT_S
    ) as rig:
        run = await rig.new_run()
        await train(run, 0, 4)
        for passed_s, num_left in [(0.0, 3), (2 * 24 * 3600.0, 2)]:
            # Of the past one is kept: the day is divided into more parts than these few steps.
            await rig.sweep(passed_s)
            # Snapshots are written and tidied up beside the run.
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    folders = await snapshot_folders(rig, run)
                    found = sorted(folders[0].parent.iterdir()) if folders else []
                    if len(folders) == num_left and found == sorted(folders):
                        break
                    await asyncio.sleep(0.005)


async def test_replay_that_gives_other_bits_is_reported(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await train(run, 0, 1)
    left_behind = rig.copy_data()
    edit_ledger(left_behind, "UPDATE operations SET result = x'00' WHERE sequence_number = 1")
    await rig.recover_from(left_behind)
    assert await run.step() == 2
    assert (await run.status()).replay_diverged
    await rig.restart()
    assert (await run.status()).replay_diverged
