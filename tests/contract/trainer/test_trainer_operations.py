"""Order, repetition, gaps and waiting: what the operations of a run promise."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2
from tests.fakes.scheduler import bearer
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    code_of,
    error_of,
    logprobs_of,
    make_datum,
    metadata_of,
    new_id,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.pod_keys import pod

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import checkpoint_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost

pytestmark = pytest.mark.asyncio(loop_scope="module")
State = trainer_pb2.OperationMetadata
GAP_TIMEOUT_S = 0.5
"""Long enough for a few calls to be made within it on a busy machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    async with running_trainer(data_dir, engine_host, max_queued_operations=8) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def impatient_run(tmp_path: Path, engine_host: EngineHost) -> AsyncIterator[RunClient]:
    """A run whose trainer gives missing numbers up soon."""
    async with running_trainer(tmp_path, engine_host, gap_timeout_s=GAP_TIMEOUT_S) as rig:
        yield await rig.new_run("impatient")


@pytest_asyncio.fixture(loop_scope="module")
async def run(rig: TrainerRig, request: pytest.FixtureRequest) -> RunClient:
    return await rig.new_run(re.sub("[^a-z0-9]+", "-", request.node.name)[-60:].strip("-"))


def wait_all(run: RunClient, after: int, timeout_s: float = TIMEOUT_S) -> Any:
    timeout = duration_pb2.Duration()
    timeout.FromNanoseconds(int(timeout_s * 1e9))
    request = trainer_pb2.WaitOperationsRequest(run=run.name, after_revision=after, timeout=timeout)
    return run.call("WaitOperations", request)


# Order.


async def test_calls_that_arrive_in_any_order_execute_in_theirs(
    rig: TrainerRig, run: RunClient
) -> None:
    in_order = await rig.new_run("in-order")
    for seed in (0, 1):
        await in_order.step(make_datum(seed=seed))

    with rig.engine_held():
        last = await run.optim_step(number=4)
        held = metadata_of(last)
        assert held.state == State.STATE_HELD
        assert held.waiting_for == "sequence number 1, which has not arrived"
        await run.forward_backward(make_datum(seed=1), number=3)
        await run.optim_step(number=2)
        await run.forward_backward(make_datum(seed=0), number=1)
        assert metadata_of(await run.get(4)).state in (State.STATE_QUEUED, State.STATE_RUNNING)
    assert response_of(await run.wait(last), trainer_pb2.OptimStepResponse()).version == 2
    assert await run.bits("a") == await in_order.bits("a")
    finished = (await wait_all(run, 0)).operations
    assert [metadata_of(operation).sequence_number for operation in finished[:4]] == [1, 2, 3, 4]


async def test_submitting_does_not_wait_for_the_engine(rig: TrainerRig, run: RunClient) -> None:
    with rig.engine_held():
        operations = [await run.forward_backward(), await run.optim_step()]
        assert not any(operation.done for operation in operations)
        second = metadata_of(await run.wait(2, timeout_s=0))
        assert second.state in (State.STATE_QUEUED, State.STATE_RUNNING)
        status = await run.status()
        assert (status.num_pending_operations, status.next_sequence_number) == (2, 3)
    assert (await run.wait(2)).done


async def test_queue_is_bounded_and_a_full_one_accepts_nothing(
    rig: TrainerRig, run: RunClient
) -> None:
    with rig.engine_held():
        for _ in range(8):
            await run.forward_backward()
        error = await refusal(run.forward_backward(number=9))
        assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert error.retry_after_s is not None
        assert (await run.status()).next_sequence_number == 9
    await run.wait(8)
    assert (await run.wait(await run.forward_backward(number=9))).done


# Repetition.


async def test_a_repeated_request_is_the_same_operation_applied_once(
    rig: TrainerRig, run: RunClient
) -> None:
    once = await rig.new_run("applied-once")
    await once.step()
    ids = new_id(), new_id()
    for _ in range(2):  # the second time both are done
        for _ in range(2):
            first, *others = await asyncio.gather(
                *(run.forward_backward(number=1, request_id=ids[0]) for _ in range(3))
            )
            assert {first.name} == {operation.name for operation in others}
            await run.optim_step(number=2, request_id=ids[1])
        await run.wait(2)
    repeated = await run.forward_backward(number=1, request_id=ids[0])
    assert repeated.done
    assert logprobs_of(repeated) == logprobs_of(await run.get(1))
    assert (await run.status()).version == 1
    assert await run.bits("a") == await once.bits("a")


async def test_a_repeated_refused_request_is_refused_alike(run: RunClient) -> None:
    request_id = new_id()
    first = await refusal(run.forward_backward(number=1, request_id=request_id, loss="mse"))
    second = await refusal(run.forward_backward(number=1, request_id=request_id, loss="mse"))
    assert (first.reason, first.message) == (second.reason, second.message)
    assert (await run.status()).next_sequence_number == 2


# Gaps.


async def test_a_gap_is_held_then_fails_naming_the_missing_number(
    impatient_run: RunClient,
) -> None:
    run = impatient_run
    await run.step()
    operation = await run.forward_backward(number=4)
    await run.optim_step(number=5)
    metadata = metadata_of(operation)
    assert metadata.state == State.STATE_HELD
    assert "sequence number 3" in metadata.waiting_for
    assert "sequence number 3" in (await run.status()).waiting_for

    for number in (4, 5):
        error = error_of(await run.wait(number))
        assert (code_of(error), error.reason) == ("ABORTED", "SEQUENCE_GAP")
        assert error.metadata["missing"] == "3"
        assert "number 6" in error.message
    late = await refusal(run.forward_backward(number=3))
    assert (code_of(late), late.reason, late.metadata["missing"]) == (
        "ABORTED",
        "SEQUENCE_GAP",
        "3",
    )
    assert error_of(await run.get(3)).reason == "SEQUENCE_GAP"

    status = await run.status()
    assert (status.next_sequence_number, status.version, status.waiting_for) == (6, 1, "")
    run.next_number = 6
    assert await run.step() == 2


async def test_a_gap_of_many_numbers_is_given_up_at_once(
    impatient_run: RunClient,
) -> None:
    run = impatient_run
    operation = await run.forward_backward(number=7)
    error = error_of(await run.wait(operation))
    assert error.metadata["missing"] == "1"
    finished = (await wait_all(run, 0)).operations
    assert sorted(metadata_of(operation).sequence_number for operation in finished) == [
        *range(1, 8)
    ]


async def test_a_late_arrival_before_the_timeout_closes_the_gap(
    rig: TrainerRig, run: RunClient
) -> None:
    held = await run.optim_step(number=2)
    await run.forward_backward(number=1)
    assert response_of(await run.wait(held), trainer_pb2.OptimStepResponse()).version == 1


async def test_after_a_gap_the_gradient_counts_as_incomplete(
    impatient_run: RunClient,
) -> None:
    run = impatient_run
    await run.wait(await run.forward_backward(number=1))
    await run.wait(await run.forward_backward(number=3))
    # Number 2 may have been a gradient: its sender must have seen that it is lost.
    error = error_of(await run.wait(await run.optim_step(number=4, observed=1)))
    assert (error.reason, error.metadata["failed"]) == ("GRADIENT_INCOMPLETE", "2")
    assert await run.step() == 1


# An accumulation that lost a part.


async def test_optim_step_behind_an_unseen_failure_is_incomplete(
    rig: TrainerRig, run: RunClient
) -> None:
    plain = await rig.new_run("not-mixed-up")
    await plain.step(make_datum(seed=3))

    await run.forward_backward(make_datum(seed=1))
    await refusal(run.forward_backward(loss="mse"))
    error = error_of(await run.wait(await run.optim_step()))
    assert (code_of(error), error.reason) == ("FAILED_PRECONDITION", "GRADIENT_INCOMPLETE")
    assert error.metadata["failed"] == "2"
    assert "send the whole accumulation again" in error.message
    assert (await run.status()).version == 0
    # The gradient is cleared: what follows is as if the accumulation had never been.
    assert await run.step(make_datum(seed=3)) == 1
    assert await run.bits("a") == await plain.bits("a")


async def test_optim_step_that_saw_the_failure_goes_on(rig: TrainerRig, run: RunClient) -> None:
    plain = await rig.new_run("goes-on")
    await plain.step(make_datum(seed=1))

    await run.forward_backward(make_datum(seed=1))
    await refusal(run.forward_backward(loss="mse"))
    done = await run.wait(await run.optim_step(observed=2))
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 1
    assert await run.bits("a") == await plain.bits("a")


async def test_a_refusal_while_the_slice_before_it_computes_is_not_forgotten(
    rig: TrainerRig, run: RunClient
) -> None:
    with rig.engine_held():
        first = await run.forward_backward(number=1)
        async with asyncio.timeout(TIMEOUT_S):
            while metadata_of(await run.get(1)).state != State.STATE_RUNNING:
                await asyncio.sleep(0)
        await refusal(run.forward_backward(number=2, loss="mse"))
    await run.wait(first)
    error = error_of(await run.wait(await run.optim_step(number=3)))
    assert (error.reason, error.metadata["failed"]) == ("GRADIENT_INCOMPLETE", "2")


async def test_a_refused_optim_step_leaves_the_gradient(rig: TrainerRig, run: RunClient) -> None:
    plain = await rig.new_run("refused-step")
    await plain.step()
    await run.forward_backward()
    assert (await refusal(run.optim_step(beta1=2.0))).reason == "INVALID_FIELD"
    done = await run.wait(await run.optim_step(observed=2))
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 1
    assert await run.bits("a") == await plain.bits("a")


async def test_forward_changes_nothing(rig: TrainerRig, run: RunClient) -> None:
    plain = await rig.new_run("without-forward")
    await plain.step()
    forward = await run.wait(await run.forward_backward(method="Forward"))
    gradient = await run.wait(await run.forward_backward())
    response = response_of(forward, trainer_pb2.ForwardResponse())
    found = [decode_tensor(output.logprobs).tolist() for output in response.outputs]
    assert found == logprobs_of(gradient)
    await run.wait(await run.optim_step())
    assert await run.bits("a") == await plain.bits("a")


# Waiting.


async def test_wait_operations_follows_a_cursor(run: RunClient) -> None:
    await run.step()
    first = await wait_all(run, 0)
    assert [metadata_of(operation).revision for operation in first.operations] == [1, 2]
    assert first.revision == 2
    empty = await wait_all(run, first.revision, timeout_s=0)
    assert (list(empty.operations), empty.revision) == ([], 2)

    waiting = asyncio.create_task(wait_all(run, first.revision))
    await run.forward_backward()
    answer = await waiting
    assert [operation.name for operation in answer.operations] == [f"{run.name}/operations/3"]
    # From the middle, and from the beginning again.
    assert [metadata_of(o).revision for o in (await wait_all(run, 1)).operations] == [2, 3]
    assert len((await wait_all(run, 0)).operations) == 3


async def test_wait_operation_returns_at_its_timeout(rig: TrainerRig, run: RunClient) -> None:
    with rig.engine_held():
        await run.forward_backward()
        operation = await run.wait(1, timeout_s=0.02)
        assert not operation.done
        assert (await wait_all(run, 0, timeout_s=0.02)).operations == []
    assert (await run.wait(1)).done


async def test_list_operations_pages(rig: TrainerRig, run: RunClient) -> None:
    for _ in range(5):
        await run.wait(await run.forward_backward())
    names: list[str] = []
    page_token = ""
    num_pages = 0
    while page_token or not num_pages:
        request = operations_pb2.ListOperationsRequest(
            name=run.name, page_size=2, page_token=page_token
        )
        page = await rig.operations.ListOperations(
            request, metadata=run.metadata, timeout=TIMEOUT_S
        )
        names += [operation.name for operation in page.operations]
        page_token = page.next_page_token
        num_pages += 1
    assert num_pages == 3
    assert names == [f"{run.name}/operations/{number}" for number in range(1, 6)]


# Life cycle.


async def test_capabilities_name_models_losses_and_limits(rig: TrainerRig, run: RunClient) -> None:
    request = trainer_pb2.TrainerServiceGetCapabilitiesRequest()
    found = await run.call("GetCapabilities", request)
    assert [model.base_model for model in found.models] == ["tiny"]
    assert set(found.losses) == {
        "cross_entropy",
        "importance_sampling",
        "ppo",
        "cispo",
        "dro",
        "gspo",
        "stable_reinforce",
    }
    assert (found.max_queued_operations, found.max_resident_runs) == (8, 8)
    request.base_model = "other"
    assert not (await run.call("GetCapabilities", request)).models


def release(run: RunClient, mode: Any, epoch: int = 1) -> Any:
    request = trainer_control_pb2.ReleaseRunRequest(run=run.name, epoch=epoch, mode=mode)
    return run.rig.stub.ReleaseRun(request, metadata=pod("scheduler"), timeout=TIMEOUT_S)


PARK = trainer_control_pb2.ReleaseRunRequest.MODE_PARK
DELETE = trainer_control_pb2.ReleaseRunRequest.MODE_DELETE


async def test_adopting_again_changes_nothing_and_an_older_epoch_is_refused(
    rig: TrainerRig, run: RunClient
) -> None:
    await run.step()
    assert (await rig.adopt(run.name, epoch=1)).version == 1
    assert (await rig.adopt(run.name, epoch=3)).version == 1
    error = await refusal(rig.adopt(run.name, epoch=2))
    assert (code_of(error), error.reason, error.metadata["epoch"]) == ("ABORTED", "ABORTED", "3")
    assert await run.step() == 2


@pytest.mark.parametrize("mode", [PARK, DELETE])
async def test_a_release_under_another_epoch_changes_nothing(
    rig: TrainerRig, run: RunClient, mode: Any
) -> None:
    await run.step()
    await rig.adopt(run.name, epoch=2)
    error = await refusal(release(run, mode, epoch=1))
    assert code_of(error) == "ABORTED"
    assert await run.step() == 2


async def test_a_parked_run_comes_back_with_its_next_operation(run: RunClient) -> None:
    await run.step()
    before = await run.bits("before")
    await release(run, PARK)
    assert not (await run.status()).resident
    assert await run.bits("after") == before
    assert (await run.status()).resident
    assert await run.step() == 2


async def test_a_deleted_run_is_gone_for_its_owner_and_for_who_waits(
    rig: TrainerRig, run: RunClient
) -> None:
    await run.saved("a")
    await run.forward_backward(number=4)
    waiting = asyncio.create_task(run.wait(4))
    await release(run, DELETE)
    assert not (await waiting).done
    assert (await refusal(run.forward_backward())).reason == "RUN_NOT_FOUND"
    assert (await refusal(run.get(1))).reason == "RUN_NOT_FOUND"
    # The name is free again, with a ledger of its own.
    again = RunClient(rig, run.name, rig.scheduler.new_key("p"))
    await rig.adopt(run.name, epoch=2)
    assert await again.step() == 1


async def test_exported_weights_are_pods_only_and_stay_while_unchanged(
    rig: TrainerRig, run: RunClient
) -> None:
    await run.step()
    request = trainer_control_pb2.ExportWeightsRequest(run=run.name)
    exported = [
        await rig.stub.ExportWeights(request, metadata=pod("sampler"), timeout=TIMEOUT_S)
        for _ in range(2)
    ]
    assert exported[0] == exported[1]
    assert exported[0].version == 1
    assert Path(exported[0].manifest_uri.removeprefix("file://")).is_file()
    error = await refusal(rig.stub.ExportWeights(request, metadata=run.metadata, timeout=TIMEOUT_S))
    assert error.reason == "ROLE_MISSING"


async def test_two_projects_do_not_see_each_other(rig: TrainerRig, run: RunClient) -> None:
    await run.saved("mine")
    stranger = bearer(rig.scheduler.new_key("q"))
    for method, request in (
        ("GetRunStatus", trainer_pb2.GetRunStatusRequest(run=run.name)),
        ("WaitOperations", trainer_pb2.WaitOperationsRequest(run=run.name)),
        ("ListCheckpoints", checkpoint_pb2.ListCheckpointsRequest(parent=run.name)),
    ):
        error = await refusal(run.call(method, request, metadata=stranger))
        assert error.reason == "RUN_NOT_FOUND"
    name = f"{run.name}/checkpoints/mine"
    for method, message in (
        ("GetCheckpoint", checkpoint_pb2.GetCheckpointRequest),
        ("DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest),
    ):
        error = await refusal(run.call(method, message(name=name), metadata=stranger))
        assert error.reason == "CHECKPOINT_NOT_FOUND"


async def test_pods_are_told_which_runs_of_a_project_have_work(
    rig: TrainerRig, run: RunClient
) -> None:
    idle = await rig.new_run("idle")
    await idle.step()
    request = trainer_control_pb2.ListRunStatusesRequest(parent="projects/p/trainingRuns/-")
    with rig.engine_held():
        for number in (1, 2):
            await run.forward_backward(number=number)
        answer = await rig.stub.ListRunStatuses(
            request, metadata=pod("scheduler"), timeout=TIMEOUT_S
        )
        [status] = answer.statuses
        assert (status.run, status.num_pending_operations) == (run.name, 2)
        own = await run.status()
        assert status.waiting_for == own.waiting_for
        await idle.forward_backward()
        request.page_size = 1
        listed = list[str]()
        while not listed or request.page_token:
            answer = await rig.stub.ListRunStatuses(
                request, metadata=pod("scheduler"), timeout=TIMEOUT_S
            )
            listed += [status.run for status in answer.statuses]
            assert len(answer.statuses) == 1
            request.page_token = answer.next_page_token
        assert listed == sorted((run.name, idle.name))
        elsewhere = trainer_control_pb2.ListRunStatusesRequest(parent="projects/q/trainingRuns/-")
        answer = await rig.stub.ListRunStatuses(
            elsewhere, metadata=pod("scheduler"), timeout=TIMEOUT_S
        )
        assert not answer.statuses
    error = await refusal(
        rig.stub.ListRunStatuses(request, metadata=run.metadata, timeout=TIMEOUT_S)
    )
    assert error.reason == "ROLE_MISSING"
    malformed = trainer_control_pb2.ListRunStatusesRequest(parent="../etc")
    error = await refusal(
        rig.stub.ListRunStatuses(malformed, metadata=pod("scheduler"), timeout=TIMEOUT_S)
    )
    assert error.reason == "INVALID_FIELD"
