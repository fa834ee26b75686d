"""Unreliable members of one match: slow, late, dying and doubling ones, and what each saw.

Each member has a client, and so a connection, of its own. It writes down when it arrived at each
barrier and when that opened for it. A barrier that opens for one member before all have arrived, or
a member that skips one, is a split phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import tinsmith
from tinsmith.matches import Match, MatchSpec, Member
from tinsmith.matches.types import POINTS

_SLOW_S = 0.02
_LATE_S = 0.5
_REJOIN_PAUSE_S = 0.2
_RETRY = tinsmith.RetryPolicy(budget_s=120.0, initial_backoff_s=0.02, max_backoff_s=0.25)


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """How unreliable members are; shares of all barriers.

    Attributes:
        slow: Arriving up to 20 ms later.
        late: Arriving half a second later.
        twice: Arriving two times at once, moving twice, and letting a stranger ask for the seat.
        dying: Ended without a word; another program takes the seat when its lease has run out.
        lease_s: How long a seat outlives its member.
    """

    slow: float = 0.3
    late: float = 0.002
    twice: float = 0.05
    dying: float = 0.0005
    lease_s: float = 1.0


@dataclass
class MatchCrowdOutcome:
    """What the members saw.

    Attributes:
        arrived_s: First arrival of each member at each barrier, by number of the barrier.
        opened_s: When each barrier opened first for each member.
        num_deaths: Members that ended without a word.
        num_leases_lost: Seats of members that lived, and were kept from their heartbeats.
        num_doubled: Calls that were sent twice.
        num_strangers_refused: Strangers that asked for a seat and were refused.
        num_seats_taken: Strangers that got one; its lease must have run out, which the member that
            held it is told.
        problems: What should not have happened.
        duration_s: From the first arrival to the last.
    """

    arrived_s: dict[int, dict[str, float]] = field(default_factory=dict)
    opened_s: dict[int, dict[str, float]] = field(default_factory=dict)
    num_deaths: int = 0
    num_leases_lost: int = 0
    num_doubled: int = 0
    num_strangers_refused: int = 0
    num_seats_taken: int = 0
    problems: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def check(self, agents: tuple[str, ...], num_barriers: int) -> None:
        """Hold what was seen against what barriers promise.

        Raises:
            AssertionError: If a barrier opened early, a member passed one out of order, or a
                stranger took a seat whose lease had not run out.
        """
        assert not self.problems, self.problems[:5]
        num_lapsed = self.num_leases_lost + self.num_deaths
        assert self.num_seats_taken <= num_lapsed, f"{self.num_seats_taken} seats were taken"
        last_of: dict[str, float] = {}
        for barrier in range(num_barriers):
            arrived, opened = self.arrived_s.get(barrier, {}), self.opened_s.get(barrier, {})
            assert set(arrived) == set(opened) == set(agents), f"barrier {barrier} misses members"
            assert min(opened.values()) >= max(arrived.values()), f"barrier {barrier} opened early"
            for agent, time_s in opened.items():
                assert time_s >= last_of.get(agent, 0.0), f"{agent} passed {barrier} out of order"
                last_of[agent] = time_s

    def opening_s(self) -> list[float]:
        """Return, for each barrier, the time from the last arrival until it was open for all."""
        return [
            max(self.opened_s[barrier].values()) - max(self.arrived_s[barrier].values())
            for barrier in sorted(self.opened_s)
        ]


class MatchCrowd:
    """Members of one match.

    Args:
        address: Of the scheduler.
        key: API key.
        habits: How unreliable the members are.
        seed: Decides which member does what at which barrier.
        progress: Is told the epoch, as it goes on.
    """

    def __init__(
        self,
        address: str,
        key: str,
        habits: Habits,
        *,
        seed: int,
        progress: Callable[[int], None] = lambda _epoch: None,
    ) -> None:
        self._address = address
        self._key = key
        self._habits = habits
        self._seed = seed
        self._progress = progress
        self.outcome = MatchCrowdOutcome()

    async def run(self, agents: tuple[str, ...], num_epochs: int) -> MatchCrowdOutcome:
        """Play a match of so many epochs to its end."""
        with self._client() as client:
            match = await client.matches.create_async(
                MatchSpec(
                    agents=agents,
                    num_epochs=num_epochs,
                    lease_s=self._habits.lease_s,
                    turn_timeout_s=120.0,
                    barrier_timeout_s=120.0,
                )
            )
            begin_s = time.monotonic()
            async with asyncio.TaskGroup() as members:
                for agent in agents:
                    members.create_task(self._live(match.name, agent))
            self.outcome.duration_s = time.monotonic() - begin_s
            ended = await client.matches.get_async(match.name)
            if ended.state != "completed":
                self.outcome.problems.append(f"the match is {ended.state}: {ended.failure}")
        return self.outcome

    def _client(self) -> tinsmith.Client:
        return tinsmith.Client(self._address, self._key, retry=_RETRY, operation_timeout_s=120.0)

    async def _live(self, match: str, agent: str) -> None:
        """Play as an agent; after a death, as its next program."""
        draws = random.Random(f"{self._seed}/{agent}")
        while True:
            client = self._client()
            try:
                member = await self._join(client, match, agent)
                if member is None or await self._play(client, member, draws):
                    return
                self.outcome.num_deaths += 1
            except tinsmith.AbortedError as error:
                # A busy machine may keep a member from its heartbeats; it takes its seat again.
                if error.reason != "LEASE_LOST":
                    raise
                self.outcome.num_leases_lost += 1
            finally:
                # Without `leave`: the coordinator learns of it by the lease.
                await asyncio.to_thread(client.close)

    async def _join(self, client: tinsmith.Client, match: str, agent: str) -> Member | None:
        while True:
            try:
                return await client.matches.join_async(match, agent)
            except tinsmith.FailedPreconditionError as error:
                if error.reason == "MATCH_ENDED":
                    return None
                if error.reason != "SEAT_TAKEN":
                    raise
            await asyncio.sleep(_REJOIN_PAUSE_S)

    async def _play(self, client: tinsmith.Client, member: Member, draws: random.Random) -> bool:
        """Go through the epochs; return False where the member died."""
        for epoch in member.epochs():
            if member.agent == member.match.agents[0].agent:
                self._progress(epoch.index)
            for place, point in enumerate(POINTS):
                if draws.random() < self._habits.dying:
                    return False
                await self._pass(client, member, draws, epoch.index, point)
                if place == 0:
                    await self._move(member, draws, epoch.index)
        await member.leave_async()
        return True

    async def _pass(
        self,
        client: tinsmith.Client,
        member: Member,
        draws: random.Random,
        epoch: int,
        point: str,
    ) -> None:
        habits = self._habits
        if draws.random() < habits.slow:
            await asyncio.sleep(draws.random() * _SLOW_S)
        if draws.random() < habits.late:
            await asyncio.sleep(_LATE_S)
        barrier = epoch * len(POINTS) + list(POINTS).index(point)
        arrived = self.outcome.arrived_s.setdefault(barrier, {})
        arrived.setdefault(member.agent, time.monotonic())
        if draws.random() < habits.twice:
            self.outcome.num_doubled += 1
            answers = await asyncio.gather(
                member.arrive_async(point, epoch),
                member.arrive_async(point, epoch),
                self._ask_for_seat(client, member.match, member.agent),
            )
            assert answers[0].name == answers[1].name
        else:
            await member.arrive_async(point, epoch)
        opened = self.outcome.opened_s.setdefault(barrier, {})
        opened.setdefault(member.agent, time.monotonic())

    async def _ask_for_seat(self, client: tinsmith.Client, match: Match, agent: str) -> None:
        try:
            await client.matches.join_async(match.name, agent, client_id="a-stranger")
        except tinsmith.FailedPreconditionError:
            self.outcome.num_strangers_refused += 1
        else:
            self.outcome.num_seats_taken += 1

    async def _move(self, member: Member, draws: random.Random, epoch: int) -> None:
        """Move once in the epoch's game; the last agent's move ends it."""
        agents = [each.agent for each in member.match.agents]
        turn = agents.index(member.agent)
        is_last = turn == len(agents) - 1
        rewards = dict.fromkeys(agents, 0.0) if is_last else None
        game = await member.wait_for_begin_async(epoch, 0)
        if turn:
            game, _ = await member.wait_for_turn_async(epoch, 0, turn - 1)
        if game.turn > turn or game.state != "playing":
            return
        for _ in range(2 if draws.random() < self._habits.twice else 1):
            # A member that died after its move finds it made: that is no mistake.
            with contextlib.suppress(tinsmith.FailedPreconditionError):
                await member.take_turn_async(epoch, 0, turn, "move", rewards=rewards)
