"""Episodes on a real coordinator: leases, fences, retries, limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.fakes.coordinator_harness import (
    PROJECT,
    CoordinatorRig,
    Episode,
    claim_request,
    create_request,
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


async def expire(rig: CoordinatorRig, name: str, seconds: float = 61) -> None:
    """Let the lease of an episode run out, and wait until that was noticed."""
    rig.clock.offset_s += seconds
    await eventually(lambda: _is_not_held(rig, name))


async def _is_not_held(rig: CoordinatorRig, name: str) -> bool:
    return not await has_state(rig, name, Episode.STATE_CLAIMED)


async def test_an_episode_is_registered_claimed_and_submitted(rig: CoordinatorRig) -> None:
    [created] = await rig.create(
        task_json='{"question": "1+1"}',
        sampling_session=f"{PROJECT}/samplingSessions/s",
        model="policy",
    )
    assert (created.state, created.queue, created.type) == (
        Episode.STATE_QUEUED,
        "default",
        Episode.TYPE_TRAIN,
    )
    assert (created.max_attempts, created.num_attempts, created.revision) == (4, 0, 0)
    assert "queue default" in created.waiting_for
    claimed = await rig.claim(client_id="agent-7")
    episode = claimed.episode
    assert (episode.name, episode.task_json) == (created.name, '{"question": "1+1"}')
    assert (episode.state, episode.client_id, episode.num_attempts) == (
        Episode.STATE_CLAIMED,
        "agent-7",
        1,
    )
    assert claimed.api_key.startswith(f"tse-{created.name.rpartition('/')[2]}-1-")
    ended = await rig.submit(
        claimed, 0.5, is_success=True, metrics={"turns": 3.0}, metadata_json="[1]"
    )
    assert (ended.state, ended.revision, ended.waiting_for) == (Episode.STATE_SUBMITTED, 1, "")
    assert (ended.outcome.reward, ended.outcome.is_success) == (0.5, True)
    assert dict(ended.outcome.metrics) == {"turns": 3.0}
    assert ended.end_time.ToSeconds() >= created.create_time.ToSeconds() > 0
    assert await rig.get(created.name) == ended


async def test_registration_is_all_or_none_and_answered_once(rig: CoordinatorRig) -> None:
    request = create_request(3)
    first, second = await asyncio.gather(
        *(rig.stub.CreateEpisodes(request, metadata=rig.mine) for _ in range(2))
    )
    assert first == second
    assert [episode.task_id for episode in first.episodes] == ["task-0", "task-1", "task-2"]
    claimed = await rig.claim()
    await rig.submit(claimed)
    await rig.restart()
    # As it was answered, whatever became of them since.
    assert await rig.stub.CreateEpisodes(request, metadata=rig.mine) == first
    request.episodes[0].task_id = "another"
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await rig.stub.CreateEpisodes(request, metadata=rig.mine)
    spoilt = create_request(2)
    spoilt.episodes[1].task_json = "{"
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.stub.CreateEpisodes(spoilt, metadata=rig.mine)
    listed = await rig.stub.ListEpisodes(
        episode_pb2.ListEpisodesRequest(parent=PROJECT), metadata=rig.mine
    )
    assert len(listed.episodes) == 3


async def test_the_oldest_of_queue_and_type_is_given(rig: CoordinatorRig) -> None:
    await rig.create(queue="other")
    [score] = await rig.create(type=Episode.TYPE_EVAL)
    first, second = await rig.create(2)
    assert (await rig.claim()).episode.name == first.name
    assert (await rig.claim()).episode.name == second.name
    assert not (await rig.claim()).HasField("episode")
    assert (await rig.claim(type=Episode.TYPE_EVAL)).episode.name == score.name
    assert (await rig.claim(queue="other")).episode.queue == "other"


async def test_a_claim_is_repeated_while_its_lease_lasts(rig: CoordinatorRig) -> None:
    await rig.create(2)
    request = claim_request()
    first = await rig.stub.ClaimEpisode(request, metadata=rig.mine)
    await rig.restart()
    again = await rig.stub.ClaimEpisode(request, metadata=rig.mine)
    assert (again.lease_token, again.api_key) == (first.lease_token, first.api_key)
    assert again.episode == first.episode
    request.client_id = "somebody else"
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await rig.stub.ClaimEpisode(request, metadata=rig.mine)
    request.client_id = "agent"
    await rig.submit(first)
    late = await rig.stub.ClaimEpisode(request, metadata=rig.mine)
    # A late repeat takes no second episode, which would stay unplayed.
    assert not late.HasField("episode")
    assert "new request id" in late.waiting_for
    assert (await rig.claim()).episode.num_attempts == 1


async def test_a_lost_lease_goes_back_to_its_place_and_fences_its_holder(
    rig: CoordinatorRig,
) -> None:
    first, _ = await rig.create(2)
    lost = await rig.claim(client_id="lost")
    await rig.record(lost, [1, 2], [3])
    await expire(rig, first.name)
    queued = await rig.get(first.name, trajectories=True)
    assert queued.state == Episode.STATE_QUEUED
    assert (queued.client_id, queued.num_model_calls, len(queued.trajectories)) == ("", 0, 0)
    assert list(queued.failures) == ["attempt 1 by lost: the lease ran out"]
    for call in (rig.heartbeat, rig.submit, rig.abort):
        with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
            await call(lost)
    # It is the oldest, so it is next; the agent that lost it is still refused.
    found = await rig.claim(client_id="found")
    assert (found.episode.name, found.episode.num_attempts) == (first.name, 2)
    await rig.restart()
    with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
        await rig.record(lost, [1, 2], [3])
    verify = episode_pb2.VerifyEpisodeKeyRequest(api_key=lost.api_key)
    with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
        await rig.stub.VerifyEpisodeKey(verify, metadata=pod("gateway"))
    await rig.record(found, [1, 2], [4])
    ended = await rig.submit(found, 0.25)
    with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
        await rig.submit(lost, 1.0)
    assert await rig.get(first.name) == ended
    [trajectory] = (await rig.get(first.name, trajectories=True)).trajectories
    assert decode_tensor(trajectory.tokens).tolist() == [4]


async def test_a_lease_that_ran_out_while_nobody_served_is_lost(rig: CoordinatorRig) -> None:
    [episode] = await rig.create()
    claimed = await rig.claim()
    await rig.stop()
    rig.clock.offset_s += 61
    await rig.start()
    with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
        await rig.submit(claimed)
    assert (await rig.get(episode.name)).state == Episode.STATE_QUEUED


async def test_signs_of_life_renew_a_lease(rig: CoordinatorRig) -> None:
    [episode] = await rig.create()
    claimed = await rig.claim()
    for number in range(3):
        rig.clock.offset_s += 50
        match number:
            case 0:
                await rig.heartbeat(claimed)
            case 1:
                await rig.record(claimed, [1], [2])
            case 2:
                verify = episode_pb2.VerifyEpisodeKeyRequest(api_key=claimed.api_key)
                found = await rig.stub.VerifyEpisodeKey(verify, metadata=pod("gateway"))
                assert found.name == episode.name
    rig.clock.offset_s += 50
    assert (await rig.submit(claimed)).state == Episode.STATE_SUBMITTED


async def test_four_claims_in_vain_are_the_end(rig: CoordinatorRig) -> None:
    [episode] = await rig.create()
    for number in range(4):
        claimed = await rig.claim()
        if number % 2:
            await expire(rig, episode.name)
        else:
            await rig.abort(claimed, "the tool broke")
    dead = await rig.get(episode.name)
    assert (dead.state, dead.num_attempts, dead.revision) == (Episode.STATE_DEAD, 4, 1)
    assert list(dead.failures) == [
        "attempt 1 by agent: aborted: the tool broke",
        "attempt 2 by agent: the lease ran out",
        "attempt 3 by agent: aborted: the tool broke",
        "attempt 4 by agent: the lease ran out",
    ]
    assert not dead.HasField("outcome")
    assert not (await rig.claim()).HasField("episode")


async def test_submits_and_aborts_are_repeated(rig: CoordinatorRig) -> None:
    await rig.create(2)
    submitted = await rig.claim()
    answer = await rig.submit(submitted, 0.1, metrics={"a": 1.0, "b": 2.0})
    await rig.restart()
    assert await rig.submit(submitted, 0.1, metrics={"b": 2.0, "a": 1.0}) == answer
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="EPISODE_ENDED") as errors:
        await rig.submit(submitted, 0.2)
    assert errors[0].metadata["state"] == "submitted"
    for call in (rig.abort, rig.heartbeat):
        with expect_rpc_error(Code.FAILED_PRECONDITION, reason="EPISODE_ENDED"):
            await call(submitted)
    aborted = await rig.claim(max_held=1)
    first = await rig.abort(aborted)
    assert first.state == Episode.STATE_QUEUED
    assert await rig.abort(aborted) == first
    other = await rig.claim()
    assert (await rig.abort(aborted)).num_attempts == 2
    for late in (rig.submit, rig.heartbeat):
        with expect_rpc_error(Code.FAILED_PRECONDITION, reason="EPISODE_ENDED"):
            await late(aborted)
    assert (await rig.submit(other)).state == Episode.STATE_SUBMITTED


async def test_cancelled_episodes_are_told_to_their_holders(rig: CoordinatorRig) -> None:
    held, waiting = await rig.create(2)
    [elsewhere] = await rig.create(queue="elsewhere")
    claimed = await rig.claim()
    await rig.record(claimed, [1], [2])
    assert await rig.cancel() == 2
    assert await rig.cancel() == 0
    for name in (held.name, waiting.name):
        assert await has_state(rig, name, Episode.STATE_CANCELLED)
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="EPISODE_ENDED") as errors:
        await rig.heartbeat(claimed)
    assert errors[0].metadata["state"] == "cancelled"
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="EPISODE_ENDED"):
        await rig.record(claimed, [1], [2])
    missing = f"{PROJECT}/episodes/missing"
    with expect_rpc_error(Code.NOT_FOUND, reason="EPISODE_NOT_FOUND"):
        await rig.cancel(names=[elsewhere.name, missing])
    assert await has_state(rig, elsewhere.name, Episode.STATE_QUEUED)
    assert await rig.cancel(names=[elsewhere.name, held.name]) == 1


async def test_a_client_that_holds_enough_waits_for_an_end(rig: CoordinatorRig) -> None:
    await rig.create(3)
    first = await rig.claim(max_held=2)
    await rig.claim(max_held=2)
    refused = await rig.claim(max_held=2)
    assert not refused.HasField("episode")
    assert "holds 2 episodes" in refused.waiting_for
    assert refused.retry_after.seconds == 1
    waiting = asyncio.create_task(rig.claim(max_held=2, timeout_s=20))
    # Another caller is not held up by it.
    assert (await rig.claim(client_id="other", timeout_s=20)).HasField("episode")
    await rig.create()
    await rig.submit(first)
    assert (await waiting).HasField("episode")


async def test_a_waiting_claim_is_woken(rig: CoordinatorRig) -> None:
    waiting = [asyncio.create_task(rig.claim(timeout_s=20)) for _ in range(3)]
    await eventually(lambda: _listeners(rig) == 3)
    [episode] = await rig.create()
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    claimed = done.pop().result()
    # The second one is woken by what comes back, the third one by what is new.
    await rig.abort(claimed)
    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    again = done.pop().result()
    assert again.episode.name == episode.name
    rig.clock.offset_s += 61
    assert (await asyncio.gather(*pending))[0].episode.num_attempts == 3


def _listeners(rig: CoordinatorRig) -> int:
    waiting = rig.pod._bells._waiting
    return sum(len(bells) for key, bells in waiting.items() if not isinstance(key, tuple))


async def test_a_wake_up_is_not_lost_with_who_was_woken(rig: CoordinatorRig) -> None:
    given_up = asyncio.create_task(rig.claim(timeout_s=20))
    await eventually(lambda: _listeners(rig) == 1)
    patient = asyncio.create_task(rig.claim(timeout_s=20))
    await eventually(lambda: _listeners(rig) == 2)
    given_up.cancel()
    await rig.create()
    # Whether the server heard of the cancel before or after it gave the episode away.
    await asyncio.gather(given_up, return_exceptions=True)
    name = (await _claimed_or_expired(rig, patient)).episode.name
    assert name.startswith(PROJECT)


async def _claimed_or_expired(
    rig: CoordinatorRig, task: asyncio.Task[episode_pb2.ClaimEpisodeResponse]
) -> episode_pb2.ClaimEpisodeResponse:
    done, _ = await asyncio.wait([task], timeout=0.5)
    if not done:
        rig.clock.offset_s += 61
    return await task


async def test_a_claim_says_why_there_is_nothing(rig: CoordinatorRig) -> None:
    answer = await rig.claim()
    assert "none is open" in answer.waiting_for
    assert answer.retry_after.seconds == 1
    assert answer.lease_token == answer.api_key == ""
    await rig.create()
    await rig.claim()
    answer = await rig.claim(timeout_s=0.05)
    assert "1 are being played" in answer.waiting_for
    assert not answer.retry_after.nanos


async def test_waiting_claims_are_sent_away_when_the_pod_stops(rig: CoordinatorRig) -> None:
    waiting = asyncio.create_task(rig.claim(timeout_s=20))
    await eventually(lambda: _listeners(rig) == 1)
    await rig.pod.stop()
    with expect_rpc_error(Code.UNAVAILABLE, reason="DRAINING"):
        await waiting


async def test_a_watch_sees_every_end_once_and_goes_on(rig: CoordinatorRig) -> None:
    episodes = await rig.create(4)
    await rig.create(queue="elsewhere")
    request = episode_pb2.WatchEpisodesRequest(parent=PROJECT)
    watch = rig.stub.WatchEpisodes(request, metadata=rig.mine)
    first = await rig.claim()
    await rig.record(first, [1, 2], [3])
    await rig.submit(first, 0.5)
    ended = await watch.read()
    assert (ended.name, ended.outcome.reward, ended.revision) == (episodes[0].name, 0.5, 1)
    assert decode_tensor(ended.trajectories[0].tokens).tolist() == [3]
    await rig.cancel(queue="elsewhere")
    await rig.submit(await rig.claim())
    second = await watch.read()
    assert second.name == episodes[1].name
    watch.cancel()
    await rig.submit(await rig.claim())
    await rig.restart()
    request.after_revision = second.revision
    watch = rig.stub.WatchEpisodes(request, metadata=rig.mine)
    assert (await watch.read()).name == episodes[2].name
    await rig.cancel()
    last = await watch.read()
    assert (last.name, last.state) == (episodes[3].name, Episode.STATE_CANCELLED)
    watch.cancel()


async def test_a_quiet_watch_ends(small: CoordinatorRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes_module, "MAX_QUIET_S", 0.05)
    request = episode_pb2.WatchEpisodesRequest(parent=PROJECT)
    watch = small.stub.WatchEpisodes(request, metadata=small.mine, timeout=10)
    assert await watch.read() is grpc.aio.EOF


async def test_lists_are_filtered_and_cut(rig: CoordinatorRig) -> None:
    created = await rig.create(5)
    await rig.create(queue="elsewhere")
    await rig.submit(await rig.claim())

    async def list_all(**fields: Any) -> list[str]:
        names, token = [], ""
        while True:
            request = episode_pb2.ListEpisodesRequest(
                parent=PROJECT, page_size=2, page_token=token, **fields
            )
            answer = await rig.stub.ListEpisodes(request, metadata=rig.mine)
            assert len(answer.episodes) <= 2
            names += [episode.name for episode in answer.episodes]
            token = answer.next_page_token
            if not token:
                return names

    assert await list_all(queue="default") == [each.name for each in reversed(created)]
    assert len(await list_all()) == 6
    assert await list_all(states=[Episode.STATE_SUBMITTED]) == [created[0].name]
    request = episode_pb2.ListEpisodesRequest(parent=PROJECT, page_token="x")
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.stub.ListEpisodes(request, metadata=rig.mine)
