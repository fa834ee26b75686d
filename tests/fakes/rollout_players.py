"""Players of rollouts that do as a test says, and calls to a coordinator that has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from google.longrunning import operations_pb2, operations_pb2_grpc
from tests.fakes.coordinator_harness import PROJECT, CoordinatorRig, duration, new_id

from tinsmith.rollouts import Play, PlayFailure, TerminationReason, TokenSample, Trajectory, Turn
from tinsmith.rollouts.trajectory_codec import encode_trajectory
from tinsmith.v1 import coordinator_pb2_grpc, rollout_pb2
from tinsmith_coordinator.rollouts.players import Played
from tinsmith_coordinator.store.rollout_records import NewBatch

SESSION = f"{PROJECT}/samplingSessions/s"
ENVIRONMENT = f"{PROJECT}/environments/guessing"
TIMEOUT_S = 60


def finished(play: Play, *, num_tokens: int = 4) -> Played:
    """Return an episode whose tokens tell which play it was."""
    sample = TokenSample(
        tokens=np.full(num_tokens, 100 * play.task + 10 * play.member + play.attempt, np.int64),
        loss_mask=np.asarray([False] + [True] * (num_tokens - 1)),
        logprobs=np.full(num_tokens, -0.5, np.float32),
        versions=np.full(num_tokens, 1, np.int64),
        turn_indices=np.asarray([-1] + [0] * (num_tokens - 1), np.int64),
    )
    turn = Turn(num_tokens - 1, "stop", float(play.member), {})
    trajectory = Trajectory((sample,), (turn,), TerminationReason.DONE)
    return Played(encode_trajectory(trajectory).SerializeToString(), num_tokens - 1)


def failed(play: Play) -> Played:
    """Return a play that failed for infrastructure."""
    return Played(failure=PlayFailure("environment_failed", f"worker died at {play}"))


class FakePlayers:
    """Plays at once, as `outcome` says; those that `hangs` names wait to be cancelled."""

    def __init__(self) -> None:
        self.begun: list[Play] = []
        self.cancelled: list[Play] = []
        self.outcome: Callable[[Play], Played] = finished
        self.hangs: Callable[[Play], bool] = lambda _: False
        self.refusal: Exception | None = None
        """Raised where a batch is checked."""
        self.opening: list[Exception] = []
        """Raised one by one where a batch is opened."""
        self.projects: list[str] = []

    async def check(self, project: str, new: NewBatch) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def open(self, project: str, content: bytes) -> FakePlayers:
        self.projects.append(project)
        if self.opening:
            raise self.opening.pop(0)
        return self

    async def play(self, play: Play) -> Played:
        self.begun.append(play)
        try:
            while self.hangs(play):
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled.append(play)
            raise
        return self.outcome(play)

    async def close(self) -> None:
        pass


def request_of(num_tasks: int = 2, **fields: Any) -> rollout_pb2.GenerateRolloutsRequest:
    """Return a request for groups of two, unless told otherwise."""
    groups = rollout_pb2.RolloutGroupConfig(**{"group_size": 2, **fields.pop("groups", {})})
    limits = rollout_pb2.RolloutLimits(**{"max_tokens": 8, **fields.pop("limits", {})})
    timeout_s = fields.pop("timeout_s", 60)
    return rollout_pb2.GenerateRolloutsRequest(
        **{
            "parent": PROJECT,
            "request_id": new_id(),
            "sampling_session": SESSION,
            "environment": ENVIRONMENT,
            "tasks": [rollout_pb2.RolloutTask(seed=seed) for seed in range(num_tasks)],
            "groups": groups,
            "limits": limits,
            "timeout": duration(timeout_s),
            **fields,
        }
    )


class RolloutCaller:
    """Calls to the rollouts of a coordinator."""

    def __init__(self, rig: CoordinatorRig) -> None:
        self.rig = rig

    @property
    def stub(self) -> Any:
        return coordinator_pb2_grpc.CoordinatorServiceStub(self.rig.channel)

    @property
    def operations(self) -> Any:
        return operations_pb2_grpc.OperationsStub(self.rig.channel)

    async def generate(
        self, request: rollout_pb2.GenerateRolloutsRequest | None = None, **fields: Any
    ) -> operations_pb2.Operation:
        """Ask for rollouts."""
        answer: operations_pb2.Operation = await self.stub.GenerateRollouts(
            request or request_of(**fields), metadata=self.rig.mine, timeout=TIMEOUT_S
        )
        return answer

    async def wait(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        """Return an operation that is done."""
        request = operations_pb2.WaitOperationRequest(
            name=operation.name, timeout=duration(TIMEOUT_S)
        )
        answer: operations_pb2.Operation = await self.operations.WaitOperation(
            request, metadata=self.rig.mine, timeout=TIMEOUT_S + 5
        )
        assert answer.done, metadata_of(answer)
        return answer

    async def episodes(
        self, operation: operations_pb2.Operation, *, page_size: int = 100
    ) -> list[rollout_pb2.RolloutEpisode]:
        """Return all plays of a batch that ended, read by pages."""
        request = rollout_pb2.ListRolloutEpisodesRequest(
            parent=batch_of(operation), page_size=page_size
        )
        found: list[rollout_pb2.RolloutEpisode] = []
        while True:
            answer = await self.stub.ListRolloutEpisodes(
                request, metadata=self.rig.mine, timeout=TIMEOUT_S
            )
            found += answer.episodes
            assert len(answer.episodes) <= page_size
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    async def watch(
        self, operation: operations_pb2.Operation, after_revision: int = 0
    ) -> list[rollout_pb2.RolloutUpdate]:
        """Return the updates of a batch until it ended."""
        request = rollout_pb2.WatchRolloutEpisodesRequest(
            name=batch_of(operation), after_revision=after_revision
        )
        stream = self.stub.WatchRolloutEpisodes(request, metadata=self.rig.mine, timeout=TIMEOUT_S)
        return [update async for update in stream]

    async def cancel(self, operation: operations_pb2.Operation) -> None:
        """Cancel a batch."""
        request = operations_pb2.CancelOperationRequest(name=operation.name)
        await self.operations.CancelOperation(request, metadata=self.rig.mine, timeout=TIMEOUT_S)


def batch_of(operation: operations_pb2.Operation) -> str:
    """Return the name of the batch that an operation plays."""
    return str(operation.name.rpartition("/operations/")[0])


def metadata_of(operation: operations_pb2.Operation) -> rollout_pb2.GenerateRolloutsMetadata:
    """Return how a batch stands."""
    metadata = rollout_pb2.GenerateRolloutsMetadata()
    operation.metadata.Unpack(metadata)
    return metadata


def groups_of(operation: operations_pb2.Operation) -> dict[int, list[int]]:
    """Return the members of each group of a batch that is complete."""
    response = rollout_pb2.GenerateRolloutsResponse()
    assert operation.response.Unpack(response), operation.error
    return {group.task_index: list(group.member_indices) for group in response.groups}


def plays_of(episodes: list[rollout_pb2.RolloutEpisode]) -> list[Play]:
    """Return which plays some episodes were."""
    return [Play(each.task_index, each.member_index, each.attempt) for each in episodes]
