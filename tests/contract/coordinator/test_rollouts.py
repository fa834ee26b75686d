"""Rollouts on the server: groups, failures, results, and what becomes of them in a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.longrunning import operations_pb2
from google.rpc import code_pb2
from tests.fakes.coordinator_harness import PROJECT, CoordinatorRig, running_coordinator
from tests.fakes.rollout_players import (
    FakePlayers,
    RolloutCaller,
    failed,
    finished,
    groups_of,
    metadata_of,
    plays_of,
    request_of,
)
from tests.fakes.scheduler import bearer
from tests.fakes.scheduler_fake_trainer import expect_rpc_error
from tests.support.wait import eventually

from tinsmith.rollouts import Play
from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import rollout_pb2
from tinsmith_coordinator.rollouts.players import Played
from tinsmith_runtime.errors import InvalidFieldError, WorkerUnavailableError

Code = grpc.StatusCode
Episode = rollout_pb2.RolloutEpisode


@pytest.fixture
def players() -> FakePlayers:
    return FakePlayers()


@pytest.fixture
async def rig(
    tmp_path: Path, database_url: str, players: FakePlayers
) -> AsyncIterator[CoordinatorRig]:
    async with running_coordinator(tmp_path, database_url=database_url, players=players) as rig:
        yield rig


@pytest.fixture
async def small(tmp_path: Path, players: FakePlayers) -> AsyncIterator[CoordinatorRig]:
    """A coordinator on a file: for what no database has a say in."""
    async with running_coordinator(
        tmp_path, players=players, max_rollout_trajectory_bytes=4096, max_rollout_bytes=20_000
    ) as rig:
        yield rig


async def test_groups_are_played_kept_and_read_by_pages(
    rig: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(rig)
    request = request_of(3)
    operation = await caller.generate(request)
    done = await caller.wait(operation)
    assert groups_of(done) == {0: [0, 1], 1: [0, 1], 2: [0, 1]}
    report = metadata_of(done).report
    assert (report.num_requested, report.num_begun, report.num_completed) == (6, 6, 6)
    episodes = await caller.episodes(operation, page_size=2)
    assert [each.revision for each in episodes] == [1, 2, 3, 4, 5, 6]
    assert sorted(plays_of(episodes)) == [
        Play(task, member) for task in range(3) for member in (0, 1)
    ]
    assert all(each.trajectory.turns[0].reward == each.member_index for each in episodes)
    assert (await caller.generate(request)).name == operation.name
    request.batch_key = "another"
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await caller.generate(request)
    assert players.projects == ["default"]


async def test_a_watch_goes_on_from_a_revision(rig: CoordinatorRig, players: FakePlayers) -> None:
    caller = RolloutCaller(rig)
    players.hangs = lambda play: play.member == 1
    operation = await caller.generate()
    await eventually(lambda: len(players.begun) == 4)
    waiting = metadata_of(
        await caller.operations.GetOperation(
            operations_pb2.GetOperationRequest(name=operation.name), metadata=rig.mine, timeout=5
        )
    )
    assert "episodes that are played" in waiting.waiting_for
    players.hangs = lambda _: False
    updates = await caller.watch(operation)
    assert [each.operation.done for each in updates[:-1]] == [False] * (len(updates) - 1)
    assert updates[-1].operation.done
    seen = [episode for update in updates for episode in update.episodes]
    assert [each.revision for each in seen] == [1, 2, 3, 4]
    rest = await caller.watch(operation, after_revision=3)
    assert [each.revision for update in rest for each in update.episodes] == [4]
    over = await caller.watch(operation, after_revision=10)
    assert [len(update.episodes) for update in over] == [0]


async def test_failures_are_replaced_typed_and_no_zero_reward(
    rig: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(rig)
    players.outcome = lambda play: failed(play) if play.attempt == 0 else finished(play)
    operation = await caller.generate(num_tasks=1)
    done = await caller.wait(operation)
    assert groups_of(done) == {0: [0, 1]}
    episodes = await caller.episodes(operation)
    assert [each.state for each in episodes].count(Episode.STATE_FAILED) == 2
    lost = next(each for each in episodes if each.state == Episode.STATE_FAILED)
    assert lost.failure_reason == "environment_failed"
    assert "worker died" in lost.failure
    assert not lost.HasField("trajectory")
    report = metadata_of(done).report
    assert (report.num_replaced, dict(report.failures)) == (2, {"environment_failed": 2})


async def test_a_batch_without_a_group_fails(small: CoordinatorRig, players: FakePlayers) -> None:
    caller = RolloutCaller(small)
    players.outcome = failed
    done = await caller.wait(await caller.generate(groups={"max_replacements": 1}))
    error = decode_status(done.error)
    assert (error.code, error.reason) == ("ABORTED", "NO_ROLLOUTS")
    assert "worker died" in error.metadata["last_failure"]


async def test_over_sampling_takes_the_first_and_cancels_the_rest(
    rig: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(rig)
    players.hangs = lambda play: play.member in (0, 2)
    done = await caller.wait(await caller.generate(groups={"over_sampling_factor": 2.0}))
    assert groups_of(done) == {0: [1, 3], 1: [1, 3]}
    report = metadata_of(done).report
    assert (report.num_begun, report.num_completed, report.num_cancelled) == (8, 4, 4)
    await eventually(lambda: len(players.cancelled) == 4)


async def test_spare_tasks_refill_groups_that_were_dropped(
    small: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(small)
    players.outcome = lambda play: failed(play) if play.task == 0 else finished(play)
    groups = {"num_groups": 1, "max_replacements": 0}
    done = await caller.wait(await caller.generate(num_tasks=3, groups=groups))
    assert groups_of(done) == {1: [0, 1]}
    assert metadata_of(done).report.num_dropped_groups == 1


async def test_cancel_ends_plays_and_keeps_what_ended(
    rig: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(rig)
    players.hangs = lambda play: play.member == 1
    operation = await caller.generate()
    await eventually(lambda: len(players.begun) == 4)
    await caller.cancel(operation)
    await caller.cancel(operation)
    done = await caller.wait(operation)
    assert done.error.code == code_pb2.CANCELLED
    assert decode_status(done.error).reason == "ROLLOUTS_CANCELLED"
    await eventually(lambda: len(players.cancelled) == 2)
    assert all(each.member_index == 0 for each in await caller.episodes(operation))
    await caller.operations.DeleteOperation(
        operations_pb2.DeleteOperationRequest(name=operation.name), metadata=rig.mine, timeout=5
    )
    with expect_rpc_error(Code.NOT_FOUND, reason="ROLLOUT_BATCH_NOT_FOUND"):
        await caller.episodes(operation)


async def test_after_a_restart_only_unfinished_plays_begin_again(
    rig: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(rig)
    players.hangs = lambda play: play.task == 1
    players.outcome = lambda play: failed(play) if play == Play(0, 1) else finished(play)
    operation = await caller.generate()
    await eventually(lambda: Play(0, 1, 1) in players.begun)
    before = await poll_episodes(caller, operation, 3)
    await rig.restart()
    again = FakePlayers()
    await rig.stop()
    rig.players = again
    await rig.start()
    done = await caller.wait(operation)
    # With their attempts, and so with their seeds.
    assert sorted(again.begun) == [Play(1, 0), Play(1, 1)]
    assert groups_of(done) == {0: [0, 1], 1: [0, 1]}
    episodes = await caller.episodes(operation)
    assert episodes[:3] == before
    assert metadata_of(done).report.num_replaced == 1


async def poll_episodes(
    caller: RolloutCaller, operation: operations_pb2.Operation, count: int
) -> list[rollout_pb2.RolloutEpisode]:
    """Return the plays of a batch once so many ended."""

    async def found() -> list[rollout_pb2.RolloutEpisode] | None:
        episodes = await caller.episodes(operation)
        return episodes if len(episodes) >= count else None

    return await eventually(found)


async def test_a_deadline_counts_through_a_restart(
    rig: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(rig)
    players.hangs = lambda play: play.task == 1
    operation = await caller.generate(timeout_s=3000)
    await poll_episodes(caller, operation, 2)
    rig.clock.offset_s += 4000
    await rig.restart()
    done = await caller.wait(operation)
    assert done.error.code == code_pb2.DEADLINE_EXCEEDED
    assert len(await caller.episodes(operation)) == 2


async def test_a_deadline_ends_what_hangs(small: CoordinatorRig, players: FakePlayers) -> None:
    caller = RolloutCaller(small)
    players.hangs = lambda _: True
    done = await caller.wait(await caller.generate(timeout_s=1))
    assert done.error.code == code_pb2.DEADLINE_EXCEEDED
    await eventually(lambda: len(players.cancelled) == 4)


async def test_a_revoked_key_plays_no_further_episode(
    small: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(small)
    players.hangs = lambda _: True
    operation = await caller.generate(groups={"max_concurrency": 1})
    await eventually(lambda: players.begun)
    small.scheduler.revoked |= set(small.scheduler.projects)
    small.mine = bearer(small.scheduler.new_key("default"))
    # What was found out about the key is forgotten with the process.
    await small.restart()
    done = await caller.wait(operation)
    assert decode_status(done.error).reason == "KEY_REVOKED"
    assert len(players.begun) == 1


async def test_what_cannot_be_reached_is_tried_again(
    small: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(small)
    players.opening = [WorkerUnavailableError("the scheduler is away")] * 2
    done = await caller.wait(await caller.generate())
    assert groups_of(done) == {0: [0, 1], 1: [0, 1]}
    assert len(players.projects) == 3


async def test_an_error_that_every_play_meets_ends_the_batch(
    small: CoordinatorRig, players: FakePlayers
) -> None:
    def refuse(play: Play) -> Played:
        raise InvalidFieldError("params.temperature", "must not be negative")

    caller = RolloutCaller(small)
    players.outcome = refuse
    done = await caller.wait(await caller.generate())
    error = decode_status(done.error)
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "params.temperature")


async def test_a_bug_ends_the_batch_without_internals(
    small: CoordinatorRig, players: FakePlayers
) -> None:
    def fail(play: Play) -> Played:
        raise RuntimeError("secret internals")

    caller = RolloutCaller(small)
    players.outcome = fail
    done = await caller.wait(await caller.generate())
    assert done.error.code == code_pb2.INTERNAL
    assert "secret" not in done.error.message


async def test_trajectories_that_are_too_large(small: CoordinatorRig, players: FakePlayers) -> None:
    caller = RolloutCaller(small)
    players.outcome = lambda play: finished(play, num_tokens=4 if play.member else 400)
    operation = await caller.generate(groups={"min_group_size": 1})
    done = await caller.wait(operation)
    assert groups_of(done) == {0: [1], 1: [1]}
    assert dict(metadata_of(done).report.failures) == {"trajectory_too_large": 2}
    players.outcome = lambda play: finished(play, num_tokens=150)
    done = await caller.wait(await caller.generate(num_tasks=4))
    assert decode_status(done.error).reason == "CAPACITY_EXHAUSTED"


async def test_what_failed_is_kept_and_takes_no_room_from_what_counts(
    small: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(small)
    whole = finished(Play(0, 0, 0), num_tokens=40)
    assert 500 < len(whole.content) < 1000
    lost = failed(Play(0, 0, 0))
    players.outcome = lambda play: (
        finished(play) if play.attempt == 9 else replace(lost, content=whole.content)
    )
    operation = await caller.generate(num_tasks=4, groups={"max_replacements": 9})
    done = await caller.wait(operation)
    assert groups_of(done) == {task: [0, 1] for task in range(4)}
    episodes = await caller.episodes(operation)
    bad = [each for each in episodes if each.state == rollout_pb2.RolloutEpisode.STATE_FAILED]
    assert len(bad) == 4 * 2 * 9
    # An eighth of what the batch may take.
    assert sum(each.HasField("trajectory") for each in bad) == 20_000 // 8 // len(whole.content)
    assert all(each.failure.startswith("worker died") for each in bad)


async def test_batches_are_listed_newest_first(small: CoordinatorRig) -> None:
    caller = RolloutCaller(small)
    names = [(await caller.wait(await caller.generate())).name for _ in range(3)]
    request = operations_pb2.ListOperationsRequest(name=f"{PROJECT}/rolloutBatches/-", page_size=2)
    first = await caller.operations.ListOperations(request, metadata=small.mine, timeout=60)
    request.page_token = first.next_page_token
    rest = await caller.operations.ListOperations(request, metadata=small.mine, timeout=60)
    listed = [each.name for page in (first, rest) for each in page.operations]
    assert listed == names[::-1]
    assert not rest.next_page_token
