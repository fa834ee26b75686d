"""Native calls through the gateway: routed by field 1, bytes and statuses untouched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.fakes.gateway_harness import (
    PROJECT,
    RUN,
    TIMEOUT_S,
    FakePod,
    GatewayRig,
    code_of,
    refusal,
    running_gateway,
)
from tests.fakes.scheduler import bearer
from tests.support.pod_keys import credentials
from tests.support.wait import eventually

from tinsmith.v1 import (
    checkpoint_pb2,
    environment_pb2,
    environment_pb2_grpc,
    episode_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    trainer_pb2,
    workers_pb2,
)
from tinsmith_gateway.proxy import grpc_proxy
from tinsmith_gateway.proxy.proxied_methods import METHODS
from tinsmith_runtime.errors import RunMovedError, ShapeMismatchError


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GatewayRig]:
    async with running_gateway(tmp_path) as rig:
        yield rig


async def test_a_checkpoint_is_found_although_nobody_holds_its_run(rig: GatewayRig) -> None:
    checkpoint = f"{RUN}/checkpoints/final"
    rig.scheduler.runs[RUN] = ""
    rig.scheduler.checkpoints[checkpoint] = rig.other.server.address
    found = await rig.call(
        "/tinsmith.v1.CheckpointService/GetCheckpoint",
        checkpoint_pb2.GetCheckpointRequest(name=checkpoint),
        checkpoint_pb2.Checkpoint,
    )
    assert (found.name, len(rig.other.requests)) == (checkpoint, 1)


@pytest.mark.parametrize("is_old", [False, True])
async def test_the_checkpoints_of_a_run_are_listed_by_who_knows_them(
    rig: GatewayRig, is_old: bool
) -> None:
    """Older schedulers name only the worker that holds a run."""
    rig.scheduler.runs[RUN] = rig.other.server.address if is_old else ""
    if not is_old:
        rig.scheduler.checkpoint_addresses[RUN] = rig.other.server.address
    await rig.call(
        "/tinsmith.v1.CheckpointService/ListCheckpoints",
        checkpoint_pb2.ListCheckpointsRequest(parent=RUN),
        checkpoint_pb2.ListCheckpointsResponse,
    )
    assert len(rig.other.requests) == 1


async def test_a_bound_key_gets_the_environment_of_its_pool(rig: GatewayRig) -> None:
    role = workers_pb2.Worker.ROLE_ENVIRONMENT
    rig.scheduler.list_worker(role, rig.other.server.address, pool="space.j")
    bound = rig.scheduler.new_key(PROJECT, pool="space.j")
    for key, pod in ((bound, rig.other), (rig.key, rig.pod)):
        await rig.call(
            "/tinsmith.v1.EnvironmentService/ListEnvironments",
            environment_pb2.ListEnvironmentsRequest(parent=f"projects/{PROJECT}"),
            environment_pb2.ListEnvironmentsResponse,
            key=key,
        )
        assert len(pod.requests) == 1


# What is passed on.


async def test_answers_come_back_byte_for_byte(rig: GatewayRig) -> None:
    path = "/tinsmith.v1.TrainerService/GetRunStatus"
    request = trainer_pb2.GetRunStatusRequest(run=RUN).SerializeToString()
    async with grpc.aio.insecure_channel(rig.pod.server.address) as direct:
        straight = await rig.call(path, request, None, channel=direct)
    through = await rig.call(path, request, None)
    assert through == straight
    assert through.endswith(b"\xc2\x3e\x02hi"), "an unknown field is kept"


async def test_requests_arrive_byte_for_byte(rig: GatewayRig) -> None:
    request = trainer_pb2.GetRunStatusRequest(run=RUN).SerializeToString() + b"\xc2\x3e\x02hi"
    await rig.call("/tinsmith.v1.TrainerService/GetRunStatus", request, None)
    assert rig.pod.requests[0].SerializeToString() == request


async def test_metadata_pass_both_ways(rig: GatewayRig) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call = rig.get_run_status(metadata=(("traceparent", trace), ("cookie", "mine")))
    await call
    assert dict(await call.initial_metadata())["x-from-pod"] == "initial"
    assert dict(await call.trailing_metadata())["x-from-pod-bin"] == b"\x00\xff"
    arrived = rig.pod.metadata[0]
    assert (arrived["traceparent"], arrived["authorization"]) == (trace, f"Bearer {rig.key}")
    assert "cookie" not in arrived


async def test_a_status_comes_back_with_its_details(rig: GatewayRig) -> None:
    async def failure(channel: grpc.aio.Channel) -> tuple[Any, ...]:
        rig.pod.fail.append(ShapeMismatchError("data[3]", "has 5 weights for 4 tokens", index=3))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.get_run_status(channel=channel)
        details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
        return caught.value.code(), caught.value.details(), details

    async with grpc.aio.insecure_channel(rig.pod.server.address) as direct:
        assert await failure(rig.channel) == await failure(direct)


async def test_a_deadline_is_passed_on(rig: GatewayRig) -> None:
    await rig.get_run_status(timeout_s=9)
    assert 0 < rig.pod.timeouts_s[0] <= 9


async def test_a_call_without_a_deadline_gets_one(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, max_native_call_s=33.0) as rig:
        await rig.get_run_status(timeout_s=None)
        await rig.get_run_status(timeout_s=500)
        # The wire format rounds up.
        assert all(30 < timeout_s < 34 for timeout_s in rig.pod.timeouts_s)


async def test_a_call_ends_at_its_deadline(rig: GatewayRig) -> None:
    rig.pod.hold.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.get_run_status(timeout_s=1.0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(rig.pod.cancelled.wait(), TIMEOUT_S)


async def test_a_cancelled_call_is_cancelled_at_the_pod(rig: GatewayRig) -> None:
    rig.pod.hold.clear()
    call = rig.get_run_status()
    await asyncio.wait_for(rig.pod.entered.wait(), TIMEOUT_S)
    call.cancel()
    await asyncio.wait_for(rig.pod.cancelled.wait(), TIMEOUT_S)


async def test_a_cancelled_stream_is_cancelled_at_the_pod(rig: GatewayRig) -> None:
    rig.pod.hold.clear()
    call = rig.stream_sample()
    assert (await call.read()).token_index == 0
    await asyncio.wait_for(rig.pod.entered.wait(), TIMEOUT_S)
    call.cancel()
    await asyncio.wait_for(rig.pod.cancelled.wait(), TIMEOUT_S)


async def test_streams_are_passed_piece_by_piece(rig: GatewayRig) -> None:
    rig.pod.hold.clear()
    call = rig.stream_sample()
    # The pod has not ended: the pieces do not wait for one another.
    assert [(await call.read()).token_index for _ in range(3)] == [0, 1, 2]
    rig.pod.hold.set()
    assert await call.read() is grpc.aio.EOF
    assert dict(await call.trailing_metadata())["x-from-pod"] == "trailing"


async def test_a_stream_fails_as_at_the_pod(rig: GatewayRig) -> None:
    rig.pod.num_pieces = 1
    rig.pod.hold.clear()
    call = rig.stream_sample()
    await call.read()
    await asyncio.wait_for(rig.pod.entered.wait(), TIMEOUT_S)
    rig.pod.fail.append(ShapeMismatchError("prompt", "is wrong"))
    rig.pod.hold.set()
    assert (await refusal(call.read())).reason == "SHAPE_MISMATCH"


async def test_two_streams_pass_each_other(rig: GatewayRig) -> None:
    stub: Any = environment_pb2_grpc.EnvironmentServiceStub(rig.channel)
    call = stub.StepInstances(metadata=bearer(rig.key), timeout=TIMEOUT_S)
    for index in range(3):
        await call.write(
            environment_pb2.StepInstancesRequest(
                instance=f"projects/{PROJECT}/instances/i", step_index=index
            )
        )
        assert (await call.read()).step_index == index
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_a_stream_that_asks_nothing_ends(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, max_native_call_s=0.2) as rig:
        stub: Any = environment_pb2_grpc.EnvironmentServiceStub(rig.channel)
        call = stub.StepInstances(metadata=bearer(rig.key))
        code = await asyncio.wait_for(call.code(), TIMEOUT_S)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_the_key_of_an_episode_is_in_no_log(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[dict[str, str]] = []
    monkeypatch.setattr(grpc_proxy, "bind_log_fields", lambda **fields: bound.append(fields))
    path = "/tinsmith.v1.EpisodeService/VerifyEpisodeKey"
    request = episode_pb2.VerifyEpisodeKeyRequest(api_key="tse-secret")
    error = await refusal(rig.call(path, request, None))
    assert error.reason == "ROLE_MISSING"
    assert "tse-secret" not in str(bound)
    assert not METHODS[path].is_named


async def test_a_plain_stub_of_the_contract_works(rig: GatewayRig) -> None:
    """A client generated from the protos, blocking, with nothing but a key."""

    def ask() -> scheduler_pb2.TrainingRun:
        with grpc.insecure_channel(rig.gateway.address) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return stub.GetTrainingRun(
                scheduler_pb2.GetTrainingRunRequest(name=RUN),
                metadata=(("authorization", f"Bearer {rig.key}"),),
                timeout=TIMEOUT_S,
            )

    found = await asyncio.to_thread(ask)
    assert (found.name, found.trainer_address) == (RUN, rig.pod.server.address)


@pytest.mark.parametrize("pins", [True, False])
async def test_clients_are_told_whether_to_stay(tmp_path: Path, pins: bool) -> None:
    async with running_gateway(tmp_path, pins_clients=pins) as rig:
        call = rig.call(
            "/tinsmith.v1.SchedulerService/GetTrainingRun",
            scheduler_pb2.GetTrainingRunRequest(name=RUN),
            None,
        )
        await call
        headers = dict(await call.initial_metadata())
        assert headers.get("x-tinsmith-gateway") == ("pinned" if pins else None)


# Where it goes.


async def test_a_run_that_moved_is_found_at_once(rig: GatewayRig) -> None:
    await rig.get_run_status()
    rig.scheduler.runs[RUN] = rig.other.server.address
    rig.pod.fail.append(RunMovedError("the run is elsewhere"))
    assert (await rig.get_run_status()).run == RUN
    assert (len(rig.pod.requests), len(rig.other.requests)) == (2, 1)
    await rig.get_run_status()
    assert len(rig.other.requests) == 2


async def test_a_run_that_is_still_moving_is_not_asked_for_thrice(rig: GatewayRig) -> None:
    rig.pod.fail += [RunMovedError("the run is elsewhere") for _ in range(5)]
    error = await refusal(rig.get_run_status())
    assert (code_of(error), error.reason) == ("UNAVAILABLE", "RUN_MOVED")
    assert len(rig.pod.requests) == 2


async def test_another_pod_on_the_port_is_noticed(rig: GatewayRig, tmp_path: Path) -> None:
    stranger = FakePod(rig.scheduler, services="environment")
    await stranger.server.start()
    rig.scheduler.runs[RUN] = stranger.server.address
    error = await refusal(rig.get_run_status())
    assert (code_of(error), error.reason) == ("UNAVAILABLE", "WORKER_UNAVAILABLE")
    rig.scheduler.runs[RUN] = rig.pod.server.address
    assert (await rig.get_run_status()).run == RUN
    await stranger.server.stop()


async def test_a_stream_that_moved_is_found_at_once(rig: GatewayRig) -> None:
    rig.pod.fail.append(RunMovedError("the run is elsewhere"))
    pieces = [piece.token_index async for piece in rig.stream_sample()]
    assert pieces == [0, 1, 2]


async def test_a_pod_that_is_gone_is_looked_up_for_the_next_call(rig: GatewayRig) -> None:
    await rig.get_run_status()
    await rig.pod.server.stop()
    rig.scheduler.runs[RUN] = rig.other.server.address
    error = await refusal(rig.get_run_status())
    assert (code_of(error), error.reason) == ("UNAVAILABLE", "WORKER_UNAVAILABLE")
    assert error.retry_after_s is not None
    assert (await rig.get_run_status()).run == RUN


async def test_nobody_holds_the_run(rig: GatewayRig) -> None:
    rig.scheduler.runs[RUN] = ""
    error = await refusal(rig.get_run_status())
    assert (code_of(error), error.reason) == ("UNAVAILABLE", "WORKER_UNAVAILABLE")


async def test_many_calls_ask_once_where_a_run_is(rig: GatewayRig) -> None:
    await asyncio.gather(*(rig.get_run_status() for _ in range(50)))
    assert rig.scheduler.num_lookups == 1


# What is refused.


async def test_an_unknown_run(rig: GatewayRig) -> None:
    error = await refusal(rig.get_run_status(f"projects/{PROJECT}/trainingRuns/none"))
    assert (code_of(error), error.reason) == ("NOT_FOUND", "RUN_NOT_FOUND")


async def test_runs_of_others_can_not_be_told_from_none(rig: GatewayRig) -> None:
    """There, not there, or without a holder: one answer."""
    held, moving, none = (f"projects/q/trainingRuns/{name}" for name in ("a", "b", "c"))
    rig.scheduler.runs |= {held: rig.pod.server.address, moving: ""}
    answers = set()
    for run in (held, moving, none):
        error = await refusal(rig.get_run_status(run))
        answers.add((code_of(error), error.reason, error.message.replace(run, "it")))
    assert answers == {("NOT_FOUND", "RUN_NOT_FOUND", "it does not exist in this project")}
    assert (await rig.get_run_status(held, key=rig.scheduler.new_key("q"))).run == held


@pytest.mark.parametrize(
    "path",
    [
        "/tinsmith.v1.TrainerService/Guess",
        "/tinsmith.v2.TrainerService/GetRunStatus",
        # For pods alone, which call each other directly.
        "/tinsmith.v1.TrainerControlService/AdoptRun",
        "/tinsmith.v1.TrainerControlService/ExportWeights",
        "/tinsmith.v1.WorkerService/ListWorkers",
        "/nothing",
    ],
)
async def test_an_unknown_method(rig: GatewayRig, path: str) -> None:
    error = await refusal(rig.call(path, b"", None))
    assert (code_of(error), error.reason) == ("UNIMPLEMENTED", "METHOD_UNKNOWN")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"\x0a\x7fshort", "MALFORMED_REQUEST", id="truncated"),
        pytest.param(b"\x08\x01", "MALFORMED_REQUEST", id="a-number-for-a-name"),
        pytest.param(b"\x0a\x02\xff\xff", "MALFORMED_REQUEST", id="not-utf8"),
        pytest.param(b"\xff" * 20, "MALFORMED_REQUEST", id="garbage"),
    ],
)
async def test_malformed_requests(rig: GatewayRig, body: bytes, reason: str) -> None:
    error = await refusal(rig.call("/tinsmith.v1.TrainerService/GetRunStatus", body, None))
    assert (code_of(error), error.reason) == ("INVALID_ARGUMENT", reason)
    assert rig.pod.requests == []


async def test_an_operation_of_nobody(rig: GatewayRig) -> None:
    error = await refusal(
        rig.call("/google.longrunning.Operations/GetOperation", b"\x0a\x04what", None)
    )
    assert (code_of(error), error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_bad_keys(rig: GatewayRig) -> None:
    unknown = "tsk_" + "a" * 12 + "_" + "b" * 43
    for key, reason in (("", "KEY_MISSING"), ("what", "KEY_INVALID"), (unknown, "KEY_INVALID")):
        error = await refusal(rig.get_run_status(key=key))
        assert (code_of(error), error.reason) == ("UNAUTHENTICATED", reason), key
    assert rig.pod.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "/tinsmith.v1.KeyService/VerifyKey",
        "/tinsmith.v1.CheckpointService/GetCheckpoint",
        "/tinsmith.v1.EpisodeService/RecordModelCall",
        "/tinsmith.v1.TrainerService/GetRunStatus",
    ],
)
async def test_the_key_of_the_pods_is_not_taken(rig: GatewayRig, path: str) -> None:
    key = str(credentials("gateway").key)
    error = await refusal(rig.call(path, b"", None, key=key))
    assert code_of(error) == "PERMISSION_DENIED"


async def test_a_project_has_a_share_whatever_its_keys(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, max_requests_per_project=2) as rig:
        rig.pod.hold.clear()
        running = [asyncio.ensure_future(rig.get_run_status()) for _ in range(2)]
        await eventually(lambda: len(rig.pod.requests) >= 2)
        error = await refusal(rig.get_run_status())
        assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
        assert error.retry_after_s is not None
        another = rig.scheduler.new_key(PROJECT)
        assert (await refusal(rig.get_run_status(key=another))).reason == "RATE_LIMITED"
        # Waits are counted apart, and so is another project.
        stranger = rig.scheduler.new_key("other")
        assert (await refusal(rig.get_run_status(key=stranger))).reason == "RUN_NOT_FOUND"
        waiting = asyncio.ensure_future(rig.wait_operations())
        await eventually(lambda: len(rig.pod.requests) >= 3)
        rig.pod.hold.set()
        await asyncio.gather(*running, waiting)
        await rig.get_run_status()


# Its end.


async def test_health_needs_no_key(rig: GatewayRig) -> None:
    stub: Any = health_pb2_grpc.HealthStub(rig.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_end_waits_for_calls_and_cuts_waits(rig: GatewayRig) -> None:
    watch = health_pb2_grpc.HealthStub(rig.channel).Watch(
        health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
    )
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    rig.pod.hold.clear()
    running = asyncio.ensure_future(rig.get_run_status())
    waiting = asyncio.ensure_future(rig.wait_operations())
    await eventually(lambda: len(rig.pod.requests) >= 2)
    stopping = asyncio.create_task(rig.gateway.stop())
    error = await refusal(waiting)
    assert (code_of(error), error.reason) == ("UNAVAILABLE", "DRAINING")
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()
    assert not stopping.done()
    rig.pod.hold.set()
    assert (await running).run == RUN
    await stopping
