"""Calls of the members of a match, with defaults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.fakes.coordinator_harness import PROJECT, CoordinatorRig, duration, new_id

from tinsmith.v1 import coordinator_pb2, coordinator_pb2_grpc

Match = coordinator_pb2.Match
Game = coordinator_pb2.Game
Barrier = coordinator_pb2.Barrier
POINTS = (
    Barrier.POINT_ROLLOUT_START,
    Barrier.POINT_ROLLOUT_END,
    Barrier.POINT_UPDATE_START,
    Barrier.POINT_UPDATE_END,
)


@dataclasses.dataclass
class Player:
    """A member of a match, by its token."""

    rig: CoordinatorRig
    match: str
    agent: str
    token: str

    async def move(
        self,
        game: int = 0,
        turn: int = 0,
        *,
        epoch: int = 0,
        action: Any = "x",
        next_agents: Sequence[str] = (),
        rewards: Mapping[str, float] | None = None,
    ) -> coordinator_pb2.Game:
        """Make a move, which ends the game if there are rewards."""
        request = coordinator_pb2.TakeTurnRequest(
            name=self.match,
            lease_token=self.token,
            epoch=epoch,
            game=game,
            turn=turn,
            action_json=json.dumps(action),
            next_agents=next_agents,
            is_over=rewards is not None,
            rewards=rewards or {},
        )
        answer: coordinator_pb2.Game = await stub_of(self.rig).TakeTurn(
            request, metadata=self.rig.mine, timeout=10
        )
        return answer

    async def abandon(self, game: int = 0, *, epoch: int = 0, reason: str = "") -> Any:
        """Give a game up."""
        request = coordinator_pb2.AbandonGameRequest(
            name=self.match, lease_token=self.token, epoch=epoch, game=game, reason=reason
        )
        return await stub_of(self.rig).AbandonGame(request, metadata=self.rig.mine, timeout=10)

    async def arrive(self, point: Any, *, epoch: int = 0, timeout_s: float = 0) -> bool:
        """Arrive at a barrier."""
        request = coordinator_pb2.ArriveAtBarrierRequest(
            name=self.match,
            lease_token=self.token,
            barrier=Barrier(epoch=epoch, point=point),
            timeout=duration(timeout_s),
        )
        answer = await stub_of(self.rig).ArriveAtBarrier(
            request, metadata=self.rig.mine, timeout=30
        )
        return bool(answer.is_open)

    async def heartbeat(self) -> coordinator_pb2.Match:
        """Renew the lease."""
        request = coordinator_pb2.HeartbeatMemberRequest(name=self.match, lease_token=self.token)
        answer: coordinator_pb2.Match = await stub_of(self.rig).HeartbeatMember(
            request, metadata=self.rig.mine, timeout=10
        )
        return answer

    async def leave(self, reason: str = "") -> coordinator_pb2.Match:
        """Leave the match."""
        request = coordinator_pb2.LeaveMatchRequest(
            name=self.match, lease_token=self.token, reason=reason
        )
        answer: coordinator_pb2.Match = await stub_of(self.rig).LeaveMatch(
            request, metadata=self.rig.mine, timeout=10
        )
        return answer


def stub_of(rig: CoordinatorRig) -> Any:
    """Return the stub of the matches of a coordinator, on its channel of now."""
    return coordinator_pb2_grpc.CoordinatorServiceStub(rig.channel)


async def create_match(
    rig: CoordinatorRig,
    *agents: str,
    request_id: str = "",
    lease_s: float = 60,
    turn_s: float = 60,
    barrier_s: float = 60,
    **fields: Any,
) -> coordinator_pb2.Match:
    """Create a match of agents."""
    request = coordinator_pb2.CreateMatchRequest(
        parent=PROJECT,
        request_id=request_id or new_id(),
        match=Match(
            agents=[coordinator_pb2.Agent(agent=agent) for agent in agents or ("black", "white")],
            lease_duration=duration(lease_s),
            turn_timeout=duration(turn_s),
            barrier_timeout=duration(barrier_s),
            **{"num_games": 1, **fields},
        ),
    )
    answer: coordinator_pb2.Match = await stub_of(rig).CreateMatch(
        request, metadata=rig.mine, timeout=10
    )
    return answer


async def join(rig: CoordinatorRig, match: str, agent: str, *, request_id: str = "") -> Player:
    """Take the seat of an agent."""
    request = coordinator_pb2.JoinMatchRequest(
        name=match, request_id=request_id or new_id(), agent=agent, client_id=f"client-{agent}"
    )
    answer = await stub_of(rig).JoinMatch(request, metadata=rig.mine, timeout=10)
    return Player(rig, match, agent, answer.lease_token)


async def get_match(rig: CoordinatorRig, match: str) -> coordinator_pb2.Match:
    """Return a match."""
    request = coordinator_pb2.GetMatchRequest(name=match)
    answer: coordinator_pb2.Match = await stub_of(rig).GetMatch(
        request, metadata=rig.mine, timeout=10
    )
    return answer


async def watch(
    rig: CoordinatorRig, match: str, *, after_revision: int = 0, until: Any
) -> list[coordinator_pb2.MatchUpdate]:
    """Return the updates of a match until one of them satisfies a condition."""
    request = coordinator_pb2.WatchMatchRequest(name=match, after_revision=after_revision)
    updates = []
    async for update in stub_of(rig).WatchMatch(request, metadata=rig.mine, timeout=30):
        updates.append(update)
        if until(update):
            break
    return updates


async def begin(rig: CoordinatorRig, match: Match, *, epoch: int = 0) -> list[Player]:
    """Let all agents of a match join, and open the barrier at the start of the rollout phase."""
    players = [await join(rig, match.name, agent.agent) for agent in match.agents]
    for player in players:
        await player.arrive(Barrier.POINT_ROLLOUT_START, epoch=epoch)
    return players
