"""Weights that were published for samplers stay for the grace of their readers."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.trainer_harness import TIMEOUT_S, RunClient, TrainerRig, make_datum
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import trainer_control_pb2
from tinsmith_trainer.runs.storage_cleanup import READERS_GRACE_S


async def published(rig: TrainerRig, run: RunClient) -> Path:
    request = trainer_control_pb2.ExportWeightsRequest(run=run.name)
    answer = await rig.stub.ExportWeights(request, metadata=pod("sampler"), timeout=TIMEOUT_S)
    return Path(answer.manifest_uri.removeprefix("file://")).parent


async def test_weights_that_newer_ones_replaced_stay_for_a_minute(rig: TrainerRig) -> None:
    run = await rig.new_run()
    folders = []
    for number in range(8):
        await run.step(make_datum(seed=number))
        folders.append(await published(rig, run))
    await rig.pod.sweep_checkpoints()
    assert all(folder.exists() for folder in folders)
    rig.passed_s += READERS_GRACE_S + 1
    await rig.pod.sweep_checkpoints()
    assert [folder.exists() for folder in folders] == [False] * 7 + [True]


async def test_weights_of_the_process_before_stay_for_a_minute(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.step()
    before = await published(rig, run)
    await rig.restart()
    newest = await published(rig, run)

    async def is_noted() -> bool:
        await rig.pod.sweep_checkpoints()
        assert before.exists()
        rig.passed_s += READERS_GRACE_S + 1
        await rig.pod.sweep_checkpoints()
        return not before.exists()

    assert newest != before
    assert before.exists()
    await eventually(is_noted)
    assert newest.exists()
