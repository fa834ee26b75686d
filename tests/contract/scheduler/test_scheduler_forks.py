"""Runs that begin as forks of other runs: what may be forked, and where a fork is placed."""

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
    running_rig,
)
from tests.support.wait import eventually

from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import models_pb2, scheduler_pb2
from tinsmith_runtime.errors import (
    RunNotFoundError,
    StepExpiredError,
    StorageUnavailableError,
)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path) as rig:
        await rig.register()
        yield rig


@pytest.fixture
async def owner(rig: Rig) -> Metadata:
    return await rig.user("default")


async def source_run(rig: Rig, who: Metadata, project: str = "default", **fields: Any) -> Any:
    adapter = models_pb2.AdapterConfig(lora=models_pb2.LoraConfig(rank=4, seed=3))
    return await rig.create_run(who, await rig.session(who, project), adapter=adapter, **fields)


async def begin(rig: Rig, who: Metadata, source: str, **fields: Any) -> Any:
    values = {"base_model": "", "source_run": source, "source_step": 2, **fields}
    return await rig.begin_run(who, await rig.session(who), **values)


async def ended(rig: Rig, who: Metadata, operation: Any) -> Any:
    return await rig.wait(who, operation.name)


async def test_a_fork_has_model_and_adapter_of_its_source_and_is_copied_by_its_trainer(
    rig: Rig, owner: Metadata
) -> None:
    source = await source_run(rig, owner)
    operation = await ended(rig, owner, await begin(rig, owner, source.name, display_name="try"))
    fork = scheduler_pb2.TrainingRun()
    assert operation.response.Unpack(fork)
    assert (fork.base_model, fork.adapter, fork.display_name) == (BASE_MODEL, source.adapter, "try")
    assert (fork.source_run, fork.source_step, fork.rerun_sequence_number) == (source.name, 2, 0)
    [call] = rig.trainer.fork_calls
    assert (call.run, call.epoch) == (fork.name, fork.epoch)
    assert (call.source_run, call.source_step, call.reruns_step) == (source.name, 2, False)
    assert rig.trainer.adopted[fork.name].adapter == rig.trainer.adopted[source.name].adapter


async def test_a_fork_that_reruns_its_step_says_from_where(rig: Rig, owner: Metadata) -> None:
    source = await source_run(rig, owner)
    operation = await ended(rig, owner, await begin(rig, owner, source.name, reruns_step=True))
    fork = scheduler_pb2.TrainingRun()
    assert operation.response.Unpack(fork)
    assert (await rig.get_run(owner, fork.name)).rerun_sequence_number == 7


async def test_a_step_that_is_gone_fails_the_creation(rig: Rig, owner: Metadata) -> None:
    source = await source_run(rig, owner)
    rig.trainer.fork_errors = [StepExpiredError("step 2 is not kept any more; it has steps 5 to 9")]
    operation = await ended(rig, owner, await begin(rig, owner, source.name))
    error = decode_status(operation.error)
    assert (error.reason, "steps 5 to 9" in error.message) == ("STEP_EXPIRED", True)
    # What was adopted for it is removed.
    await eventually(lambda: len(rig.trainer.deleted) == 1)
    assert source.name not in rig.trainer.deleted


async def test_a_copy_of_unknown_outcome_is_asked_for_again(rig: Rig, owner: Metadata) -> None:
    source = await source_run(rig, owner)
    rig.trainer.fork_errors = [StorageUnavailableError("the store does not answer")] * 2
    operation = await ended(rig, owner, await begin(rig, owner, source.name))
    assert operation.HasField("response")
    assert len({call.run for call in rig.trainer.fork_calls}) == 1
    assert len(rig.trainer.fork_calls) == 3


async def test_another_projects_run_is_not_found(rig: Rig, owner: Metadata) -> None:
    stranger = await rig.user("other")
    theirs = await source_run(rig, stranger, "other")
    for name in (theirs.name, "projects/default/trainingRuns/missing"):
        with expect_rpc_error(StatusCode.NOT_FOUND, reason=RunNotFoundError.reason):
            await begin(rig, owner, name)
    assert rig.trainer.fork_calls == []


async def test_a_deleted_run_is_not_forked(rig: Rig, owner: Metadata) -> None:
    source = await source_run(rig, owner)
    request = scheduler_pb2.DeleteTrainingRunRequest(name=source.name)
    await rig.stub.DeleteTrainingRun(request, metadata=owner, timeout=60)
    with expect_rpc_error(StatusCode.NOT_FOUND, reason=RunNotFoundError.reason):
        await begin(rig, owner, source.name)


async def test_a_run_whose_session_ended_is_forked(rig: Rig, owner: Metadata) -> None:
    source = await source_run(rig, owner)
    request = scheduler_pb2.FinishSessionRequest(session=source.session)
    await rig.stub.FinishSession(request, metadata=owner, timeout=60)
    operation = await ended(rig, owner, await begin(rig, owner, source.name))
    assert operation.HasField("response")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"base_model": BASE_MODEL}, "base_model", id="model"),
        pytest.param(
            {"adapter": models_pb2.AdapterConfig(lora=models_pb2.LoraConfig(rank=4))},
            "adapter",
            id="adapter",
        ),
        pytest.param({"source_step": None}, "source_step", id="no-step"),
        pytest.param({"source_step": -1}, "source_step", id="negative"),
        pytest.param({"source_run": "x"}, "source_run", id="no-name"),
        pytest.param({"source_run": ""}, "source_step", id="step-without-run"),
        pytest.param(
            {"source_run": "", "source_step": None, "reruns_step": True},
            "reruns_step",
            id="rerun-without-run",
        ),
        pytest.param(
            {"source_checkpoint": "projects/default/trainingRuns/r/checkpoints/c"},
            "source_checkpoint",
            id="two-sources",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused_by_its_field(
    rig: Rig, owner: Metadata, fields: dict[str, Any], field: str
) -> None:
    source = await source_run(rig, owner)
    with expect_rpc_error(StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD") as found:
        await begin(rig, owner, source.name, **fields)
    assert field in found[0].message


async def test_a_fork_goes_where_the_rows_of_its_source_are(rig: Rig, owner: Metadata) -> None:
    source = await source_run(rig, owner)
    # They have less to do, but another ledger, or none that is shared.
    await rig.register(name="trainer-1", address="127.0.0.1:1")
    await rig.register(name="trainer-2", address="127.0.0.1:1", ledger="l2", incarnation="1")
    for _ in range(2):
        operation = await ended(rig, owner, await begin(rig, owner, source.name))
        fork = scheduler_pb2.TrainingRun()
        assert operation.response.Unpack(fork)
        assert fork.worker == source.worker


async def test_a_fork_is_audited(rig: Rig, owner: Metadata) -> None:
    source = await source_run(rig, owner)
    await ended(rig, owner, await begin(rig, owner, source.name))
    request = scheduler_pb2.ListAuditEventsRequest(parent="projects/default")
    events = (await rig.stub.ListAuditEvents(request, metadata=rig.admin, timeout=60)).events
    assert "fork_run" in [event.action for event in events]
