"""What is refused of rollouts, before anything is played; ranges are in `test_rollout_messages`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2
from tests.fakes.coordinator_harness import PROJECT, CoordinatorRig, running_coordinator
from tests.fakes.rollout_players import FakePlayers, RolloutCaller, batch_of, request_of
from tests.fakes.scheduler import bearer
from tests.fakes.scheduler_fake_trainer import expect_rpc_error

from tinsmith.v1 import rollout_pb2
from tinsmith_runtime.errors import EnvironmentNotFoundError, SamplingSessionNotFoundError
from tinsmith_runtime.rpc.permissions import KeyRole

Code = grpc.StatusCode
INVALID, EXHAUSTED = Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED


@pytest.fixture
def players() -> FakePlayers:
    return FakePlayers()


@pytest.fixture
async def rig(tmp_path: Path, players: FakePlayers) -> AsyncIterator[CoordinatorRig]:
    async with running_coordinator(
        tmp_path,
        players=players,
        max_open_rollouts=2,
        max_rollout_episodes=64,
        max_rollout_tokens=1000,
    ) as rig:
        yield rig


WRONG: dict[str, dict[str, Any]] = {
    "no-project": {"parent": "projects"},
    "request-id": {"request_id": "1"},
    "no-session": {"sampling_session": ""},
    "no-session-name": {"sampling_session": f"{PROJECT}/checkpoints/c"},
    "environment": {"environment": "guessing"},
    "at-once": {"groups": {"max_concurrency": -5}},
    "zero-character": {"batch_key": "a\0b"},
}
FOREIGN = {
    "parent": ("projects/other", "RESOURCE_NOT_FOUND"),
    "sampling_session": ("projects/other/samplingSessions/s", "SAMPLING_SESSION_NOT_FOUND"),
    "environment": ("projects/other/environments/guessing", "ENVIRONMENT_NOT_FOUND"),
}


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        *(pytest.param(WRONG[name], INVALID, "INVALID_FIELD", id=name) for name in WRONG),
        *(
            pytest.param({field: name}, Code.NOT_FOUND, reason, id=f"foreign-{field}")
            for field, (name, reason) in FOREIGN.items()
        ),
        pytest.param({"groups": {"group_size": 40}}, EXHAUSTED, "LIMIT_EXCEEDED", id="episodes"),
        pytest.param({"limits": {"max_tokens": 300}}, EXHAUSTED, "LIMIT_EXCEEDED", id="tokens"),
    ],
)
async def test_a_bad_request_is_refused_and_nothing_is_played(
    rig: CoordinatorRig, players: FakePlayers, fields: dict[str, Any], code: Code, reason: str
) -> None:
    caller = RolloutCaller(rig)
    with expect_rpc_error(code, reason=reason):
        await caller.generate(request_of(**fields))
    listed = await caller.operations.ListOperations(
        operations_pb2.ListOperationsRequest(name=f"{PROJECT}/rolloutBatches/-"),
        metadata=rig.mine,
        timeout=5,
    )
    assert not listed.operations
    assert not players.begun


@pytest.mark.parametrize(
    "refusal",
    [
        EnvironmentNotFoundError("environment chess is not served", environment="chess"),
        SamplingSessionNotFoundError("no such session", sampling_session="s"),
    ],
    ids=["environment", "session"],
)
async def test_what_is_not_there_is_refused_at_once(
    rig: CoordinatorRig, players: FakePlayers, refusal: Exception
) -> None:
    players.refusal = refusal
    with expect_rpc_error(Code.NOT_FOUND, reason=refusal.reason):  # type: ignore[attr-defined]
        await RolloutCaller(rig).generate()


async def test_a_project_has_so_much_under_way_and_no_more(
    rig: CoordinatorRig, players: FakePlayers
) -> None:
    caller = RolloutCaller(rig)
    players.hangs = lambda _: True
    first = await caller.generate()
    with expect_rpc_error(EXHAUSTED, reason="QUEUE_FULL"):
        await caller.generate(groups={"group_size": 31})
    with expect_rpc_error(EXHAUSTED, reason="QUEUE_FULL"):
        await caller.generate(limits={"max_tokens": 245})
    await caller.generate()
    with expect_rpc_error(EXHAUSTED, reason="QUEUE_FULL"):
        await caller.generate()
    await caller.cancel(first)
    await caller.generate()


async def test_a_strangers_batch_is_not_there(rig: CoordinatorRig) -> None:
    caller = RolloutCaller(rig)
    operation = await caller.generate()
    rig.mine, name = rig.theirs, batch_of(operation)
    missing = "ROLLOUT_BATCH_NOT_FOUND"
    with expect_rpc_error(Code.NOT_FOUND, reason=missing):
        await caller.episodes(operation)
    with expect_rpc_error(Code.NOT_FOUND, reason=missing):
        await caller.watch(operation)
    for method, request in (
        ("GetOperation", operations_pb2.GetOperationRequest(name=operation.name)),
        ("WaitOperation", operations_pb2.WaitOperationRequest(name=operation.name)),
        ("CancelOperation", operations_pb2.CancelOperationRequest(name=operation.name)),
        ("DeleteOperation", operations_pb2.DeleteOperationRequest(name=operation.name)),
    ):
        with expect_rpc_error(Code.NOT_FOUND, reason="OPERATION_NOT_FOUND"):
            await getattr(caller.operations, method)(request, metadata=rig.theirs, timeout=60)
    assert name.startswith(PROJECT)


@pytest.mark.parametrize(
    "name", ["", "projects/default", f"{PROJECT}/rolloutBatches/a/b", "x" * 300]
)
async def test_malformed_names_are_refused(rig: CoordinatorRig, name: str) -> None:
    caller = RolloutCaller(rig)
    with expect_rpc_error(INVALID, reason="INVALID_FIELD"):
        await caller.stub.ListRolloutEpisodes(
            rollout_pb2.ListRolloutEpisodesRequest(parent=name), metadata=rig.mine, timeout=5
        )
    with expect_rpc_error(INVALID, reason="INVALID_FIELD"):
        await caller.operations.GetOperation(
            operations_pb2.GetOperationRequest(name=name), metadata=rig.mine, timeout=5
        )


async def test_bad_pages_revisions_and_waits_are_refused(rig: CoordinatorRig) -> None:
    caller = RolloutCaller(rig)
    operation = await caller.generate()
    for request in (
        rollout_pb2.ListRolloutEpisodesRequest(parent=batch_of(operation), page_size=-1),
        rollout_pb2.ListRolloutEpisodesRequest(parent=batch_of(operation), page_token="forged"),
    ):
        with expect_rpc_error(INVALID, reason="INVALID_FIELD"):
            await caller.stub.ListRolloutEpisodes(request, metadata=rig.mine, timeout=60)
    with expect_rpc_error(INVALID, reason="INVALID_FIELD"):
        await caller.watch(operation, after_revision=-1)
    wait = operations_pb2.WaitOperationRequest(
        name=operation.name, timeout=duration_pb2.Duration(seconds=-1)
    )
    with expect_rpc_error(INVALID, reason="INVALID_FIELD"):
        await caller.operations.WaitOperation(wait, metadata=rig.mine, timeout=60)


@pytest.mark.parametrize("role", [KeyRole.VIEWER, KeyRole.AGENT])
async def test_roles_that_only_look_or_play_ask_for_no_rollouts(
    rig: CoordinatorRig, role: KeyRole
) -> None:
    rig.mine = bearer(rig.scheduler.new_key("default", role))
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await RolloutCaller(rig).generate()
