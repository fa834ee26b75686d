"""Calls of members, strangers and the dead in any order, with restarts and time between them.

Whatever comes, moves keep their order, no phase is split, nothing waits beyond a deadline, and a
call that is refused changes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tinsmith_coordinator.episodes.lease_tokens import LeaseToken
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.matches import rules
from tinsmith_coordinator.matches.keeper import MatchKeeper
from tinsmith_coordinator.matches.matches import Matches
from tinsmith_coordinator.matches.seats import Seats
from tinsmith_coordinator.store import match_store
from tinsmith_coordinator.store.match_records import (
    Game,
    GameState,
    LossPolicy,
    Match,
    MatchRules,
    MemberState,
    Move,
    Point,
    TurnOrder,
)
from tinsmith_coordinator.store.tables import STORE
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.sql import open_store

AGENTS = ("a", "b", "c")
NUM_GAMES = 2
LEASE_S, TURN_S, BARRIER_S = 30.0, 45.0, 60.0
# Calls are made mostly by those who may make them, or no match would come far.
HOLDERS = st.sampled_from([*AGENTS * 4, "dead", "stranger"])
OFFSETS = st.sampled_from([0] * 6 + [-1, 1])
PRESENT = (MemberState.JOINED, MemberState.LOST)


class Interleavings(RuleBasedStateMachine):
    """One match of three agents, and everything that may call."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="tinsmith-match-")
        self.now_s = 1000.0
        self.num_requests = 0
        self.tokens: dict[str, str] = {}
        self.dead: list[str] = []
        self.moves: dict[tuple[int, int], list[str]] = {}
        self.open()

    def open(self) -> None:
        self.database = self.loop.run_until_complete(open_store(STORE, Path(self.folder.name)))
        bells = Bells()
        self.matches = Matches(self.database, bells, clock=self.clock, max_open=4)
        self.seats = Seats(self.database, bells, clock=self.clock)
        self.keeper = MatchKeeper(self.database, bells, clock=self.clock, retention_s=1e6)

    def clock(self, _connection: sa.Connection) -> float:
        return self.now_s

    def run(self, call: Awaitable[Any]) -> Any:
        """Return the result of a call, or its error, which must have changed nothing."""

        async def guarded() -> Any:
            try:
                return await call
            except TinsmithError as error:
                return error

        before = self.match()
        answer = self.loop.run_until_complete(guarded())
        if isinstance(answer, TinsmithError):
            assert self.match().revision == before.revision, answer
            assert answer.reason, answer
        return answer

    def match(self) -> Match:
        return self.loop.run_until_complete(self.matches.get(self.name))[0]

    def games(self) -> list[Game]:
        def read(connection: sa.Connection) -> list[Game]:
            return match_store.select_games(connection, match_store.get(connection, self.name))

        return self.loop.run_until_complete(self.database.read(read))

    def teardown(self) -> None:
        self.loop.run_until_complete(self.database.close())
        self.loop.close()
        self.folder.cleanup()

    @initialize(
        order=st.sampled_from(list(TurnOrder)),
        policy=st.sampled_from(list(LossPolicy)),
        rotates=st.booleans(),
    )
    def create(self, order: TurnOrder, policy: LossPolicy, rotates: bool) -> None:
        terms = MatchRules(
            agents=AGENTS,
            models=("",) * len(AGENTS),
            turn_order=order,
            rotates_first_agent=rotates,
            policy=policy,
            min_members=2,
            num_games=NUM_GAMES,
            num_epochs=3,
            seed=0,
            lease_duration_s=LEASE_S,
            turn_timeout_s=TURN_S,
            barrier_timeout_s=BARRIER_S,
            config_json="",
        )
        made = self.loop.run_until_complete(
            self.matches.create(terms, RequestIdentity("p", "request", "CreateMatch", b"digest"))
        )
        self.name = made.name
        for agent in AGENTS:
            self.join(agent)

    def token(self, holder: str) -> LeaseToken:
        if holder == "stranger" or (holder == "dead" and not self.dead):
            return LeaseToken(1, "a guess")
        text = self.dead[-1] if holder == "dead" else self.tokens[holder]
        return LeaseToken.parse(text)

    def must_fail(self, holder: str, answer: Any) -> None:
        if holder in ("dead", "stranger"):
            assert isinstance(answer, TinsmithError), answer

    @rule(agent=st.sampled_from(AGENTS))
    def join(self, agent: str) -> None:
        self.num_requests += 1
        answer = self.run(
            self.seats.join(self.name, agent, "program", f"request-{self.num_requests}")
        )
        if not isinstance(answer, TinsmithError):
            if agent in self.tokens:
                self.dead.append(self.tokens[agent])
            self.tokens[agent] = answer.token

    @rule(holder=HOLDERS)
    def heartbeat(self, holder: str) -> None:
        answer = self.run(self.seats.heartbeat(self.name, self.token(holder)))
        self.must_fail(holder, answer)

    @rule(holder=st.sampled_from([*AGENTS, "dead", "stranger"]), is_done=st.integers(0, 3))
    def leave(self, holder: str, is_done: int) -> None:
        if not is_done:
            answer = self.run(self.seats.leave(self.name, self.token(holder), "tired"))
            # A seat that was left before may be left again, and stays as it is.
            if holder == "stranger":
                self.must_fail(holder, answer)

    @rule(holder=HOLDERS, offset=OFFSETS)
    def arrive(self, holder: str, offset: int) -> None:
        index = max(0, self.match().num_opened + offset)
        epoch, point = divmod(index, len(Point))
        before = self.match()
        answer = self.run(
            self.seats.arrive(self.name, self.token(holder), epoch, Point(point), timeout_s=0)
        )
        if holder == "stranger":
            self.must_fail(holder, answer)
        if index > before.num_opened:
            assert isinstance(answer, TinsmithError), "no barrier is passed over"

    @rule(num=st.integers(1, 4))
    def go_on(self, num: int) -> None:
        """Do what brings the match to its next barriers, as agents do that nothing happens to."""
        for _ in range(num):
            playing = [game for game in self.games() if game.state is GameState.PLAYING]
            if not playing:
                for agent in AGENTS:
                    self.arrive(agent, 0)
            for game in playing:
                for agent in game.running:
                    self.take_turn(agent, game.game, 0, game.turn >= 2, False)

    @rule(
        holder=HOLDERS,
        number=st.integers(0, NUM_GAMES - 1),
        offset=OFFSETS,
        is_over=st.sampled_from([False, False, True]),
        is_again=st.booleans(),
    )
    def take_turn(
        self, holder: str, number: int, offset: int, is_over: bool, is_again: bool
    ) -> None:
        match = self.match()
        game = next(
            (each for each in self.games() if (each.epoch, each.game) == (match.epoch, number)),
            None,
        )
        turn = max(0, (game.turn if game else 0) + offset)
        order = match.rules.turn_order
        names_next = order is TurnOrder.CUSTOM and not is_over
        move = Move(
            epoch=match.epoch,
            game=number,
            turn=turn,
            agent="",
            action_json="1",
            next_agents=rules.active_agents(match)[:1] if names_next else (),
            is_over=is_over,
        )
        for _ in range(2 if is_again else 1):
            answer = self.run(self.seats.take_turn(self.name, self.token(holder), move))
        self.must_fail(holder, answer)
        if isinstance(answer, TinsmithError) or self.match().revision == match.revision:
            return
        assert game is not None, "there was something to move in"
        assert holder in game.running, "only an agent that is running moves"
        assert turn == game.turn
        self.moves.setdefault((match.epoch, number), []).append(holder)

    @rule(
        seconds=st.sampled_from([1.0, 10.0, 25.0, 40.0]), are_alive=st.sets(st.sampled_from(AGENTS))
    )
    def wait(self, seconds: float, are_alive: set[str]) -> None:
        """Let time pass; some members give a sign of life half way."""
        for _ in range(2):
            self.now_s += seconds / 2
            for agent in sorted(are_alive):
                self.heartbeat(agent)
            while self.loop.run_until_complete(self.keeper.expire()) <= 0:
                pass

    @rule(agent=st.sampled_from(AGENTS))
    def die_and_come_back(self, agent: str) -> None:
        """Lose a seat in silence, let another program take it, and wake the one that was dead."""
        others = {each for each in AGENTS if each != agent}
        for _ in range(2):
            self.wait(25.0, others)
        self.join(agent)
        for call in (self.heartbeat, lambda holder: self.take_turn(holder, 0, 0, False, False)):
            call("dead")

    @rule()
    def kill(self) -> None:
        """End the coordinator, and start it on the same database."""
        before = self.match()
        self.loop.run_until_complete(self.database.close())
        self.open()
        self.loop.run_until_complete(self.keeper.excuse())
        after = self.match()
        assert (after.num_opened, after.state) == (before.num_opened, before.state)

    @invariant()
    def nothing_waits_beyond_its_deadline(self) -> None:
        match = self.match()
        if not match.state.is_open:
            assert all(game.state is not GameState.PLAYING for game in self.games())
            return
        for member in match.members:
            if member.state is MemberState.JOINED:
                assert member.lease_expire_s is not None
                assert self.now_s < member.lease_expire_s <= self.now_s + LEASE_S
        for game in self.games():
            if game.state is GameState.PLAYING:
                assert game.running
                assert game.deadline_s is not None
                assert self.now_s < game.deadline_s <= self.now_s + TURN_S
        if rules.wait_deadline(match, now_s=self.now_s) is not None:
            assert match.deadline_s is not None
            assert self.now_s < match.deadline_s <= self.now_s + BARRIER_S

    @invariant()
    def no_phase_is_split(self) -> None:
        match = self.match()
        present = [member for member in match.members if member.state in PRESENT]
        for member in present:
            assert match.num_opened - 1 <= member.arrived <= match.num_opened
        playing = [game for game in self.games() if game.state is GameState.PLAYING]
        assert len(playing) == match.num_open_games
        assert not playing or match.is_in_rollout
        assert all(game.epoch == match.epoch for game in playing)

    @invariant()
    def moves_keep_their_order(self) -> None:
        match = self.match()
        if match.rules.turn_order is not TurnOrder.FIXED:
            return
        # A game is abandoned when its agents change, so one that was dropped is passed over in all.
        steps = {1, 2} if match.rules.policy is LossPolicy.DROP else {1}
        for agents in self.moves.values():
            made = {
                (AGENTS.index(later) - AGENTS.index(earlier)) % len(AGENTS)
                for earlier, later in itertools.pairwise(agents)
            }
            assert made <= steps


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=30)
