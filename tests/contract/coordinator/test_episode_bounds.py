"""Episodes: what is recorded, projects apart, limits, wrong requests, and long queues."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tests.fakes.coordinator_harness import (
    PROJECT,
    CoordinatorRig,
    Episode,
    claim_request,
    create_request,
    new_id,
    record_request,
    running_coordinator,
)
from tests.fakes.scheduler_fake_trainer import expect_rpc_error
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import episode_pb2
from tinsmith_coordinator.episodes import episodes as episodes_module

Code = grpc.StatusCode


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[CoordinatorRig]:
    async with running_coordinator(tmp_path, database_url=database_url) as rig:
        yield rig


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[CoordinatorRig]:
    """A coordinator on a file: for what no database has a say in."""
    limits = {"max_open_episodes": 3, "max_trajectory_bytes": 400}
    async with running_coordinator(tmp_path, **limits) as rig:
        yield rig


async def has_state(rig: CoordinatorRig, name: str, state: Any) -> bool:
    return (await rig.get(name)).state == state


async def test_model_calls_become_trajectories(rig: CoordinatorRig) -> None:
    await rig.create()
    claimed = await rig.claim()
    request_id = new_id()
    assert await rig.record(claimed, [1, 2], [3, 4], [5], request_id=request_id) == 0
    assert await rig.record(claimed, [1, 2], [3, 4], [5], request_id=request_id) == 0
    assert await rig.record(claimed, [1, 2, 3, 4, 9], [6]) == 2
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await rig.record(claimed, [1, 2], [7], request_id=request_id)
    await rig.restart()
    assert (await rig.get(claimed.episode.name)).num_model_calls == 3
    ended = await rig.submit(claimed, step_rewards=[0.0, 1.0, 0.5])
    assert list(ended.outcome.step_rewards) == [0.0, 1.0, 0.5]
    first, second = (await rig.get(ended.name, trajectories=True)).trajectories
    assert decode_tensor(first.prompt.chunks[0].tokens).tolist() == [1, 2]
    assert decode_tensor(first.tokens).tolist() == [3, 4, 9, 6]
    assert decode_tensor(first.mask).tolist() == [1, 1, 0, 1]
    np.testing.assert_allclose(decode_tensor(first.logprobs), [-0.03, -0.04, 0, -0.06], rtol=1e-6)
    assert decode_tensor(first.versions).tolist() == [3, 3, 0, 3]
    assert (list(first.call_indices), list(first.call_ends)) == ([0, 2], [2, 4])
    assert decode_tensor(second.tokens).tolist() == [5]


async def test_step_rewards_fit_the_calls_and_make_the_reward(rig: CoordinatorRig) -> None:
    await rig.create()
    claimed = await rig.claim()
    await rig.record(claimed, [1], [2], [3])
    submit = episode_pb2.SubmitEpisodeRequest(
        name=claimed.episode.name, lease_token=claimed.lease_token
    )
    submit.outcome.step_rewards.append(0.25)
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.stub.SubmitEpisode(submit, metadata=rig.mine)
    submit.outcome.step_rewards.append(0.5)
    assert (await rig.stub.SubmitEpisode(submit, metadata=rig.mine)).outcome.reward == 0.75


async def test_foreign_episodes_look_missing(rig: CoordinatorRig) -> None:
    await rig.create()
    claimed = await rig.claim()
    name, token = claimed.episode.name, claimed.lease_token
    calls = [
        (rig.stub.GetEpisode, episode_pb2.GetEpisodeRequest(name=name)),
        (
            rig.stub.HeartbeatEpisode,
            episode_pb2.HeartbeatEpisodeRequest(name=name, lease_token=token),
        ),
        (
            rig.stub.SubmitEpisode,
            episode_pb2.SubmitEpisodeRequest(name=name, lease_token=token, outcome={"reward": 1}),
        ),
        (rig.stub.AbortEpisode, episode_pb2.AbortEpisodeRequest(name=name, lease_token=token)),
    ]
    for method, request in calls:
        with expect_rpc_error(Code.NOT_FOUND, reason="EPISODE_NOT_FOUND") as foreign:
            await method(request, metadata=rig.theirs)
        missing = f"{PROJECT}/episodes/{'0' * 24}"
        request.name = missing
        with expect_rpc_error(Code.NOT_FOUND, reason="EPISODE_NOT_FOUND") as absent:
            await method(request, metadata=rig.mine)
        assert foreign[0].message.replace(name, "") == absent[0].message.replace(missing, "")
    for method, request in (
        (rig.stub.CreateEpisodes, create_request()),
        (rig.stub.ClaimEpisode, claim_request()),
        (rig.stub.ListEpisodes, episode_pb2.ListEpisodesRequest(parent=PROJECT)),
        (rig.stub.CancelEpisodes, episode_pb2.CancelEpisodesRequest(parent=PROJECT)),
    ):
        with expect_rpc_error(Code.NOT_FOUND, reason="RESOURCE_NOT_FOUND"):
            await method(request, metadata=rig.theirs)
    mine_under_theirs = claim_request(parent="projects/other")
    answer = await rig.stub.ClaimEpisode(mine_under_theirs, metadata=rig.theirs)
    assert not answer.HasField("episode")


async def test_only_pods_record_and_verify(rig: CoordinatorRig) -> None:
    await rig.create(2)
    first, second = await rig.claim(), await rig.claim()
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await rig.stub.RecordModelCall(record_request(first, [1], [2]), metadata=rig.mine)
    verify = episode_pb2.VerifyEpisodeKeyRequest(api_key=first.api_key)
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await rig.stub.VerifyEpisodeKey(verify, metadata=rig.mine)
    crossed = record_request(first, [1], [2])
    crossed.api_key = second.api_key
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_INVALID"):
        await rig.stub.RecordModelCall(crossed, metadata=pod("gateway"))
    for key in ("tse-x", first.api_key[:-1] + "-", first.api_key.replace("-1-", "-2-")):
        verify.api_key = key
        with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_INVALID"):
            await rig.stub.VerifyEpisodeKey(verify, metadata=pod("gateway"))


async def test_a_token_of_another_episode_is_no_proof(rig: CoordinatorRig) -> None:
    await rig.create(2)
    first, second = await rig.claim(), await rig.claim()
    for token in (second.lease_token, first.lease_token + "x", "tsl-1-" + "a" * 43):
        crossed = episode_pb2.ClaimEpisodeResponse(episode=first.episode, lease_token=token)
        with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
            await rig.submit(crossed)
    assert (await rig.submit(first)).state == Episode.STATE_SUBMITTED


async def test_limits_are_kept_before_anything_is_stored(small: CoordinatorRig) -> None:
    await small.create(3)
    with expect_rpc_error(Code.RESOURCE_EXHAUSTED, reason="QUEUE_FULL") as errors:
        await small.create()
    assert errors[0].retry_after_s is not None
    claimed = await small.claim()
    with expect_rpc_error(Code.RESOURCE_EXHAUSTED, reason="CAPACITY_EXHAUSTED"):
        await small.record(claimed, range(200), [1])
    assert (await small.heartbeat(claimed)).num_model_calls == 0
    await small.submit(claimed)
    assert len(await small.create()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"task_id": "zero\0"},
        {"model": "x" * 1025},
        {"request_id": "1"},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_wrong_episodes_are_refused(small: CoordinatorRig, fields: dict[str, Any]) -> None:
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await small.create(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"client_id": "zero\0"},
        {"queue": "-"},
        {"type": 9},
        {"request_id": ""},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_wrong_claims_are_refused(small: CoordinatorRig, fields: dict[str, Any]) -> None:
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await small.claim(**fields)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ({"reward": math.nan}, "NOT_FINITE"),
        ({"reward": None}, "INVALID_FIELD"),
    ],
)
async def test_wrong_outcomes_are_refused(
    small: CoordinatorRig, outcome: dict[str, Any], reason: str
) -> None:
    await small.create()
    claimed = await small.claim()
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason=reason):
        await small.submit(claimed, **outcome)
    assert (await small.heartbeat(claimed)).state == Episode.STATE_CLAIMED


async def test_wrong_records_are_refused(small: CoordinatorRig) -> None:
    await small.create()
    claimed = await small.claim()
    short = record_request(claimed, [1], [2, 3])
    short.sequences[0].logprobs.CopyFrom(record_request(claimed, [1], [2]).sequences[0].logprobs)
    not_finite = record_request(claimed, [1], [2])
    not_finite.sequences[0].logprobs.data = np.float32(math.nan).tobytes()
    for request, reason in (
        (short, "SHAPE_MISMATCH"),
        (not_finite, "NOT_FINITE"),
        (record_request(claimed, [1], [-2]), "INVALID_FIELD"),
        (record_request(claimed, [], [2]), "EMPTY_BATCH"),
        (record_request(claimed, [1]), "INVALID_FIELD"),
    ):
        with expect_rpc_error(Code.INVALID_ARGUMENT, reason=reason):
            await small.stub.RecordModelCall(request, metadata=pod("gateway"))


async def test_old_episodes_are_removed(rig: CoordinatorRig) -> None:
    ended, open_ = await rig.create(2)
    await rig.submit(await rig.claim())
    rig.clock.offset_s += rig.config.retention_s + 1
    await rig.restart()  # Which tidies up at once.
    await eventually(lambda: _is_gone(rig, ended.name))
    assert await has_state(rig, open_.name, Episode.STATE_QUEUED)


async def _is_gone(rig: CoordinatorRig, name: str) -> bool:
    try:
        await rig.get(name)
    except grpc.aio.AioRpcError as error:
        return error.code() is Code.NOT_FOUND
    return False


async def test_the_pod_registers_as_coordinator(small: CoordinatorRig) -> None:
    await small.pod.wait_listed(10)
    worker = small.scheduler.workers["workers/coordinator-0"]
    assert worker.address == small.pod.address
    assert worker.role == type(worker).ROLE_COORDINATOR


async def test_a_list_of_large_tasks_comes_in_messages_that_clients_take(
    small: CoordinatorRig,
) -> None:
    """gRPC's own clients take 4 MiB, and a task may have 256 KiB."""
    task_json = '"' + "x" * 250_000 + '"'
    names = []
    for _ in range(6):
        created = await small.create(3, task_json=task_json)
        names += [episode.name for episode in created]
        await small.cancel()
    listed, token = [], ""
    while True:
        page = await small.stub.ListEpisodes(
            episode_pb2.ListEpisodesRequest(parent=PROJECT, page_size=1000, page_token=token),
            metadata=small.mine,
            timeout=10,
        )
        listed += [episode.name for episode in page.episodes]
        token = page.next_page_token
        if not token:
            break
    assert listed == names[::-1]


async def test_a_long_queue_is_cancelled_without_holding_up_others(
    rig: CoordinatorRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes_module, "_CANCEL_BATCH", 2)
    await rig.create(5)
    (other,) = await rig.create(queue="other")
    held = await rig.claim()
    request = episode_pb2.CancelEpisodesRequest(parent=PROJECT)
    cancelling = rig.stub.CancelEpisodes(request, metadata=rig.mine, timeout=10)
    beside = await asyncio.gather(*(rig.claim(queue="other") for _ in range(3)))
    answer = await cancelling
    assert answer.num_cancelled == 5
    assert (await rig.get(held.episode.name)).state == Episode.STATE_CANCELLED
    assert [claimed.episode.name for claimed in beside if claimed.lease_token] == [other.name]
    listed = await rig.stub.ListEpisodes(
        episode_pb2.ListEpisodesRequest(parent=PROJECT), metadata=rig.mine, timeout=10
    )
    ended = [one.revision for one in listed.episodes if one.state == Episode.STATE_CANCELLED]
    assert (len(ended), max(ended)) == (5, answer.revision)
