"""Named checkpoints: what is saved can be listed, loaded and deleted, and nothing else can."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.numpy import load_file
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    checkpoint_files,
    error_of,
    logprobs_of,
    make_datum,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import checkpoint_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_trainer.runs.storage_cleanup import READERS_GRACE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
KIND_SAMPLER = checkpoint_pb2.Checkpoint.KIND_SAMPLER
KIND_TRAINING = checkpoint_pb2.Checkpoint.KIND_TRAINING


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    async with running_trainer(data_dir, engine_host) as rig:
        yield rig


async def loaded(run: RunClient, checkpoint: str, **options: Any) -> int:
    done = await run.wait(await run.load(checkpoint, **options))
    return response_of(done, trainer_pb2.LoadCheckpointResponse()).version


def folder_of(checkpoint: checkpoint_pb2.Checkpoint) -> Path:
    return Path(checkpoint.manifest_uri.removeprefix("file://")).parent


async def test_a_checkpoint_says_what_it_is(rig: TrainerRig) -> None:
    run = await rig.new_run("describe")
    await run.step()
    saved = await run.saved("step-1", labels={"note": "good"})
    assert saved.name == f"{run.name}/checkpoints/step-1"
    assert (saved.kind, saved.base_model, saved.version) == (KIND_TRAINING, "tiny", 1)
    assert saved.adapter.lora.rank == 2
    assert saved.sequence_number == 3
    assert dict(saved.labels) == {"note": "good"}
    files = checkpoint_files(saved)
    assert set(files) == {"adapter_model.safetensors", "optimizer.safetensors"}
    manifest = json.loads((folder_of(saved) / "manifest.json").read_text())
    assert {name: entry["size_bytes"] for name, entry in manifest["files"].items()} == {
        path.name: path.stat().st_size
        for path in folder_of(saved).iterdir()
        if path.name != "manifest.json"
    }
    assert saved.size_bytes == sum(entry["size_bytes"] for entry in manifest["files"].values())
    request = checkpoint_pb2.GetCheckpointRequest(name=saved.name)
    assert await run.call("GetCheckpoint", request) == saved


async def test_weights_are_a_peft_adapter(rig: TrainerRig) -> None:
    run = await rig.new_run("peft")
    await run.step()
    saved = await run.saved("weights", kind=KIND_SAMPLER)
    assert set(checkpoint_files(saved)) == {"adapter_model.safetensors"}
    config = json.loads((folder_of(saved) / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 32.0)
    tensors = load_file(folder_of(saved) / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.0.") for name in tensors)


async def test_a_load_with_optimizer_goes_on_as_if_never_stopped(rig: TrainerRig) -> None:
    run = await rig.new_run("straight")
    await run.step(make_datum(seed=1))
    saved = await run.saved("one")
    await run.step(make_datum(seed=2))
    wanted = await run.bits("two")

    again = await rig.new_run("again", seed=77)
    await again.forward_backward(make_datum(seed=9))  # the load clears it
    assert await loaded(again, saved.name) == 1
    assert await again.step(make_datum(seed=2)) == 2
    assert await again.bits("two") == wanted


async def test_a_load_without_optimizer_takes_the_weights_alone(rig: TrainerRig) -> None:
    run = await rig.new_run("teacher")
    await run.step()
    saved = await run.saved("one")
    weights = await run.saved("weights", kind=KIND_SAMPLER)
    pupils = []
    for name, checkpoint in (("from-training", saved), ("from-sampler", weights)):
        pupil = await rig.new_run(name)
        await pupil.step(make_datum(seed=8))  # moments that must go
        assert await loaded(pupil, checkpoint.name, include_optimizer=False) == 0
        pupils.append(pupil)
    bits = [await pupil.bits("loaded") for pupil in pupils]
    assert bits[0] == bits[1]
    files = checkpoint_files(saved)
    assert bits[0]["adapter_model.safetensors"] == files["adapter_model.safetensors"]
    assert bits[0]["optimizer.safetensors"] != files["optimizer.safetensors"]
    assert (await pupils[0].status()).version == 0


async def test_a_load_behind_queued_operations_keeps_its_place(rig: TrainerRig) -> None:
    run = await rig.new_run("in-line")
    saved = await run.saved("start")
    first = await run.forward_backward()
    await run.optim_step()
    await run.load(saved.name)
    second = await run.forward_backward()
    assert logprobs_of(await run.wait(second)) == logprobs_of(await run.wait(first))


async def test_a_failed_load_leaves_weights_and_gradient(rig: TrainerRig) -> None:
    plain, run = await rig.new_run("plain"), await rig.new_run("unharmed")
    await plain.step()
    saved = await run.saved("bad")
    (folder_of(saved) / "adapter_model.safetensors").write_bytes(b"")
    await run.forward_backward()
    assert error_of(await run.wait(await run.load(saved.name))).reason == "CHECKPOINT_CORRUPT"
    await run.wait(await run.optim_step())
    assert await run.bits("a") == await plain.bits("a")


async def test_a_loaded_run_is_restored_without_the_checkpoint_it_came_from(
    rig: TrainerRig,
) -> None:
    source = await rig.new_run("source")
    await source.step()
    saved = await source.saved("temporary")
    run = await rig.new_run("heir")
    await loaded(run, saved.name)
    await run.step()
    before = await run.bits("before")
    await run.call("DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest(name=saved.name))
    left_behind = rig.copy_data()
    original = rig.config.data_dir
    await rig.recover_from(left_behind)
    assert await run.bits("after") == before
    assert not (await run.status()).replay_diverged
    await rig.restart(data_dir=original)


async def test_a_name_is_taken_whatever_the_kind_until_it_is_deleted(rig: TrainerRig) -> None:
    run = await rig.new_run("names")
    saved = await run.saved("same")
    files = checkpoint_files(saved)
    error = error_of(await run.wait(await run.save("same", KIND_SAMPLER)))
    assert error.reason == "CHECKPOINT_ALREADY_EXISTS"
    assert checkpoint_files(saved) == files

    delete = checkpoint_pb2.DeleteCheckpointRequest(name=saved.name)
    await run.call("DeleteCheckpoint", delete)
    rig.passed_s += READERS_GRACE_S
    await rig.pod.sweep_checkpoints()
    assert not folder_of(saved).exists()
    assert (await refusal(run.call("DeleteCheckpoint", delete))).reason == "CHECKPOINT_NOT_FOUND"
    error = error_of(await run.wait(await run.load(saved.name)))
    assert error.reason == "CHECKPOINT_NOT_FOUND"
    assert (await run.saved("same")).name == saved.name


async def test_lists_are_newest_first_in_pages(rig: TrainerRig) -> None:
    run = await rig.new_run("lists", project="lists")
    other = await rig.new_run("lists-2", project="lists")
    saved = [(await run.saved(f"c{index}")).name for index in range(5)]
    elsewhere = (await other.saved("c")).name

    async def pages(parent: str, page_size: int) -> list[list[str]]:
        found: list[list[str]] = []
        token = ""
        while token or not found:
            request = checkpoint_pb2.ListCheckpointsRequest(
                parent=parent, page_size=page_size, page_token=token
            )
            page = await run.call("ListCheckpoints", request)
            found.append([checkpoint.name for checkpoint in page.checkpoints])
            token = page.next_page_token
        return found

    newest_first = saved[::-1]
    assert await pages(run.name, 2) == [newest_first[:2], newest_first[2:4], newest_first[4:]]
    assert await pages(run.name, 5) == [newest_first]
    assert await pages("projects/lists/trainingRuns/-", 4) == [
        [elsewhere, *newest_first[:3]],
        newest_first[3:],
    ]


async def test_checkpoints_go_with_their_run(rig: TrainerRig) -> None:
    run = await rig.new_run("gone", project="gone")
    saved = await run.saved("a")
    request = trainer_control_pb2.ReleaseRunRequest(
        run=run.name, epoch=1, mode=trainer_control_pb2.ReleaseRunRequest.MODE_DELETE
    )
    await rig.stub.ReleaseRun(request, metadata=pod("scheduler"), timeout=TIMEOUT_S)
    await eventually(lambda: not folder_of(saved).exists())
    get = checkpoint_pb2.GetCheckpointRequest(name=saved.name)
    assert (await refusal(run.call("GetCheckpoint", get))).reason == "CHECKPOINT_NOT_FOUND"


async def test_a_load_may_be_sent_right_behind_its_save(rig: TrainerRig) -> None:
    run = await rig.new_run("pipelined")
    await run.step()
    save = await run.save("behind", KIND_TRAINING)
    load = await run.load(f"{run.name}/checkpoints/behind")
    assert not (await run.wait(save)).HasField("error")
    assert not (await run.wait(load)).HasField("error")
