"""Runs and sampling sessions that begin from checkpoints, and which projects may do so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from tests.fakes.scheduler_fake_trainer import (
    BASE_MODEL,
    Metadata,
    Rig,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import checkpoint_pb2, models_pb2, scheduler_pb2
from tinsmith_runtime.errors import CheckpointCorruptError, UnavailableError


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path) as rig:
        await rig.register()
        await rig.register_sampler()
        yield rig


@pytest.fixture
async def owner(rig: Rig) -> Metadata:
    return await rig.user("default")


async def checkpoint_of(rig: Rig, who: Metadata) -> str:
    """Return the name of a checkpoint that the trainer knows."""
    run = await rig.create_run(who, await rig.session(who))
    name = f"{run.name}/checkpoints/best"
    rig.trainer.checkpoints[name] = BASE_MODEL
    return name


async def begin(rig: Rig, who: Metadata, session: str, source: str, **fields: Any) -> Any:
    fields = {"base_model": "", "source_checkpoint": source, **fields}
    return await rig.begin_run(who, session, **fields)


async def test_a_run_takes_model_and_adapter_from_its_source(rig: Rig, owner: Metadata) -> None:
    source = await checkpoint_of(rig, owner)
    session = await rig.session(owner)
    rig.trainer.load_gate.clear()
    operation = await begin(rig, owner, session, source, include_optimizer=True)
    await eventually(lambda: bool(rig.trainer.load_calls))
    standing = await rig.wait(owner, operation.name, 0)
    metadata = scheduler_pb2.CreateTrainingRunMetadata()
    assert standing.metadata.Unpack(metadata)
    # The run is not active before its weights are there.
    assert (standing.done, source in metadata.waiting_for) == (False, True)
    state = (await rig.get_run(owner, metadata.run)).state
    assert state == scheduler_pb2.TrainingRun.STATE_CREATING
    rig.trainer.load_gate.set()
    run = scheduler_pb2.TrainingRun()
    assert (await rig.wait(owner, operation.name)).response.Unpack(run)
    assert (run.base_model, run.source_checkpoint) == (BASE_MODEL, source)
    assert (run.adapter.lora.rank, run.adapter.lora.alpha) == (4, 8.0)
    (load,) = rig.trainer.load_calls
    assert (load.run, load.checkpoint, load.sequence_number) == (run.name, source, 1)
    assert load.include_optimizer


async def test_a_run_goes_to_the_trainer_of_its_source(rig: Rig, owner: Metadata) -> None:
    source = await checkpoint_of(rig, owner)
    # It has less to do, but is not the one that knows the checkpoint.
    await rig.register(name="trainer-1", address="127.0.0.1:1")
    run = await rig.create_run(
        owner, await rig.session(owner), base_model="", source_checkpoint=source
    )
    assert (run.trainer_address, run.epoch) == (rig.trainer.server.address, 1)


async def test_a_load_that_fails_fails_the_creation(rig: Rig, owner: Metadata) -> None:
    source = await checkpoint_of(rig, owner)
    rig.trainer.load_errors = [CheckpointCorruptError("broken")]
    operation = await begin(rig, owner, await rig.session(owner), source)
    done = await rig.wait(owner, operation.name)
    assert decode_status(done.error).reason == "CHECKPOINT_CORRUPT"
    run = operation.name.removesuffix("/operations/create")
    assert (await rig.get_run(owner, run)).state == scheduler_pb2.TrainingRun.STATE_FAILED
    await eventually(lambda: run in rig.trainer.deleted)


async def test_a_load_of_unknown_outcome_is_asked_for_again(rig: Rig, owner: Metadata) -> None:
    source = await checkpoint_of(rig, owner)
    rig.trainer.load_errors = [UnavailableError("away", retry_after_s=0.01)]
    operation = await begin(rig, owner, await rig.session(owner), source)
    assert (await rig.wait(owner, operation.name)).HasField("response")
    first, second = rig.trainer.load_calls
    assert first == second


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        pytest.param({"base_model": "other"}, "base_model", id="base-model"),
        pytest.param({"lora": {"rank": 8}}, "adapter.lora.rank", id="rank"),
        pytest.param({"lora": {"alpha": 4.0}}, "adapter.lora.alpha", id="alpha"),
        pytest.param({"lora": {"train_mlp": False}}, "adapter.lora.train_mlp", id="layers"),
        pytest.param({"full": True}, "adapter", id="full"),
        pytest.param({"chat_template": "x"}, "adapter.chat_template", id="template"),
    ],
)
async def test_what_is_given_must_agree_with_the_source(
    rig: Rig, owner: Metadata, fields: dict[str, Any], wrong: str
) -> None:
    source = await checkpoint_of(rig, owner)
    if lora := fields.pop("lora", None):
        fields["adapter"] = models_pb2.AdapterConfig(lora=models_pb2.LoraConfig(**lora))
    if template := fields.pop("chat_template", ""):
        fields["adapter"] = models_pb2.AdapterConfig(chat_template=template)
    if fields.pop("full", False):
        fields["adapter"] = models_pb2.AdapterConfig(full=models_pb2.FullParameterConfig())
    session = await rig.session(owner)
    with expect_rpc_error(StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD") as found:
        await begin(rig, owner, session, source, **fields)
    assert found[0].metadata["field"] == wrong


async def test_what_agrees_may_be_given(rig: Rig, owner: Metadata) -> None:
    source = await checkpoint_of(rig, owner)
    lora = models_pb2.LoraConfig(rank=4, alpha=8.0, seed=77)
    run = await rig.create_run(
        owner,
        await rig.session(owner),
        source_checkpoint=source,
        adapter=models_pb2.AdapterConfig(lora=lora),
    )
    assert run.adapter.lora.seed == 77


async def test_optimizer_state_must_be_there(rig: Rig, owner: Metadata) -> None:
    source = await checkpoint_of(rig, owner)
    rig.trainer.kinds[source] = checkpoint_pb2.Checkpoint.KIND_SAMPLER
    session = await rig.session(owner)
    with expect_rpc_error(StatusCode.FAILED_PRECONDITION, reason="CHECKPOINT_INCOMPATIBLE"):
        await begin(rig, owner, session, source, include_optimizer=True)
    await begin(rig, owner, session, source)
    with expect_rpc_error(StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await begin(rig, owner, session, "", base_model=BASE_MODEL, include_optimizer=True)


async def test_another_projects_checkpoint_exists_once_it_is_published(
    rig: Rig, owner: Metadata
) -> None:
    source = await checkpoint_of(rig, owner)
    guest = await rig.user("guest")
    session = await rig.session(guest, "guest")
    nothing = [source.replace("best", "none"), source.replace("run-", "run-0")]

    async def sample(name: str) -> Any:
        request = scheduler_pb2.CreateSamplingSessionRequest(
            parent=session, request_id=new_id(), checkpoint=name
        )
        return await rig.stub.CreateSamplingSession(request, metadata=guest, timeout=60)

    async def locate(name: str, who: Metadata = guest) -> Any:
        request = scheduler_pb2.LocateCheckpointRequest(checkpoint=name)
        return await rig.stub.LocateCheckpoint(request, metadata=who, timeout=60)

    async def run_from(name: str) -> Any:
        return await begin(rig, guest, session, name)

    for call in (sample, locate, run_from):
        messages = set()
        for name in (source, *nothing):
            with expect_rpc_error(StatusCode.NOT_FOUND, reason="CHECKPOINT_NOT_FOUND") as found:
                await call(name)
            messages.add(found[0].message.replace(name, "NAME"))
        assert len(messages) == 1
    for who in (owner, pod("gateway")):
        assert (await locate(source, who)).trainer_address == rig.trainer.server.address
    rig.trainer.published.add(source)
    assert (await locate(source)).trainer_address == rig.trainer.server.address
    assert (await sample(source)).checkpoint == source
    operation = await run_from(source)
    assert (await rig.wait(guest, operation.name)).HasField("response")


async def test_a_creation_goes_on_with_its_load_after_a_restart(rig: Rig, owner: Metadata) -> None:
    source = await checkpoint_of(rig, owner)
    rig.trainer.load_gate.clear()
    operation = await begin(rig, owner, await rig.session(owner), source)
    await eventually(lambda: bool(rig.trainer.load_calls))
    await rig.restart()
    await rig.register()
    rig.trainer.load_gate.set()
    assert (await rig.wait(owner, operation.name)).HasField("response")
    assert len({call.request_id for call in rig.trainer.load_calls}) == 1
