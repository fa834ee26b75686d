"""Requests about matches are held to their ranges and defaults; answers tell all of a match."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.coordinator.test_match_rules import GATHERING, IN_ROLLOUT, D, J, L, N, make_match

from tinsmith.rpc.durations import encode_duration
from tinsmith.v1 import coordinator_pb2
from tinsmith_coordinator.rpc import match_codec
from tinsmith_coordinator.store.match_records import (
    Game,
    GameState,
    LossPolicy,
    Match,
    MatchState,
    MatchUpdate,
    Move,
    Point,
    Seat,
    TurnOrder,
)
from tinsmith_runtime.errors import InvalidFieldError, NotFiniteInputError

Agent, Barrier, Message = coordinator_pb2.Agent, coordinator_pb2.Barrier, coordinator_pb2.Match
PAIR = [Agent(agent="a", model="m"), Agent(agent="b")]


def rules_of(**fields: Any) -> Any:
    return match_codec.decode_rules(Message(**{"agents": PAIR, **fields}))


def move_of(**fields: Any) -> Move:
    return match_codec.decode_move(coordinator_pb2.TakeTurnRequest(**fields))


def test_defaults_of_a_match_are_filled_in() -> None:
    plain = rules_of()
    assert (plain.agents, plain.models) == (("a", "b"), ("m", ""))
    assert (plain.turn_order, plain.policy) == (TurnOrder.FIXED, LossPolicy.WAIT)
    assert (plain.min_members, plain.rotates_first_agent, plain.num_games) == (2, False, 0)
    assert (plain.lease_duration_s, plain.turn_timeout_s) == (60, 600)
    assert plain.barrier_timeout_s == 3600
    given = rules_of(
        turn_order=Message.TURN_ORDER_CUSTOM,
        policy=Message.POLICY_ABORT,
        min_members=1,
        rotates_first_agent=True,
        num_games=4096,
        num_epochs=2**40,
        seed=9,
        lease_duration=encode_duration(1),
        turn_timeout=encode_duration(86_400),
        barrier_timeout=encode_duration(5),
        config_json="{}",
    )
    assert (given.turn_order, given.policy) == (TurnOrder.CUSTOM, LossPolicy.ABORT)
    assert (given.min_members, given.rotates_first_agent) == (1, True)
    assert (given.num_games, given.num_epochs, given.seed) == (4096, 2**40, 9)
    assert (given.lease_duration_s, given.turn_timeout_s) == (1, 86_400)
    assert (given.barrier_timeout_s, given.config_json) == (5, "{}")
    many = [Agent(agent=f"a{number}") for number in range(64)]
    assert len(rules_of(agents=many, min_members=64).agents) == 64


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"agents": PAIR[:1]}, "agents"),
        ({"agents": [Agent(agent=f"a{number}") for number in range(65)]}, "agents"),
        ({"agents": [*PAIR, PAIR[0]]}, "agents"),
        ({"agents": [PAIR[0], Agent(agent="no name")]}, "agents[1].agent"),
        ({"agents": [PAIR[0], Agent(agent="b", model="m" * 1025)]}, "agents[1].model"),
        ({"min_members": 3}, "min_members"),
        ({"min_members": -1}, "min_members"),
        ({"num_games": 4097}, "num_games"),
        ({"num_games": -1}, "num_games"),
        ({"num_epochs": 2**40 + 1}, "num_epochs"),
        ({"num_epochs": -1}, "num_epochs"),
        ({"turn_order": 9}, "turn_order"),
        ({"policy": 9}, "policy"),
        ({"lease_duration": encode_duration(0.5)}, "lease_duration"),
        ({"turn_timeout": encode_duration(0)}, "turn_timeout"),
        ({"barrier_timeout": encode_duration(86_401)}, "barrier_timeout"),
        ({"config_json": "{"}, "config_json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_match_out_of_range_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refusal:
        rules_of(**fields)
    assert refusal.value.metadata["field"] == f"match.{field}"


def test_a_move_is_read_with_all_that_it_says() -> None:
    action = f'"{"a" * (64 * 2**10 - 2)}"'
    move = move_of(
        epoch=1,
        game=2,
        turn=3,
        action_json=action,
        next_agents=["b", "a", "b"],
        is_over=True,
        rewards={"a": 1.0},
    )
    assert (move.epoch, move.game, move.turn, move.agent) == (1, 2, 3, "")
    assert (move.action_json, move.next_agents) == (action, ("b", "a"))
    assert (move.is_over, move.rewards) == (True, {"a": 1})
    assert len(move_of(next_agents=["a"] * 64, rewards={str(n): 0.0 for n in range(64)}).rewards)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"epoch": -1}, "epoch"),
        ({"game": -1}, "game"),
        ({"turn": -1}, "turn"),
        ({"action_json": "a"}, "action_json"),
        ({"action_json": f'"{"a" * (64 * 2**10 - 1)}"'}, "action_json"),
        ({"next_agents": ["a"] * 65}, "next_agents"),
        ({"rewards": {str(n): 0.0 for n in range(65)}}, "next_agents"),
        ({"rewards": {"a": math.nan}}, "rewards"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_move_out_of_range_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises((InvalidFieldError, NotFiniteInputError)) as refusal:
        move_of(**fields)
    assert refusal.value.metadata["field"] == field


def test_games_barriers_and_waits_are_held_to_their_ranges() -> None:
    asked = coordinator_pb2.AbandonGameRequest(epoch=1, game=2)
    assert match_codec.decode_game(asked) == (1, 2)
    assert match_codec.decode_game(coordinator_pb2.AbandonGameRequest()) == (0, 0)
    end = Barrier(epoch=2**40, point=Barrier.POINT_UPDATE_END)
    assert match_codec.decode_barrier(end) == (2**40, Point.UPDATE_END)
    start = Barrier(point=Barrier.POINT_ROLLOUT_START)
    assert match_codec.decode_barrier(start) == (0, Point.ROLLOUT_START)

    def wait_s(asked_s: float) -> float:
        timeout = encode_duration(asked_s)
        return match_codec.decode_wait(coordinator_pb2.ArriveAtBarrierRequest(timeout=timeout))

    assert (wait_s(0), wait_s(7), wait_s(60)) == (0, 7, 20)
    for call in (
        lambda: match_codec.decode_game(coordinator_pb2.AbandonGameRequest(epoch=-1)),
        lambda: match_codec.decode_game(coordinator_pb2.AbandonGameRequest(game=-1)),
        lambda: match_codec.decode_barrier(Barrier(epoch=0)),
        lambda: match_codec.decode_barrier(Barrier(epoch=-1, point=end.point)),
        lambda: match_codec.decode_barrier(Barrier(epoch=2**40 + 1, point=end.point)),
        lambda: wait_s(-0.5),
    ):
        with pytest.raises(InvalidFieldError):
            call()


def test_a_match_is_told_whole() -> None:
    match = replace(
        make_match(
            (J, 0),
            (L, -1),
            (D, -1),
            num_opened=IN_ROLLOUT + 4,
            num_open_games=2,
            models=("m", "", ""),
            rotates_first_agent=True,
            num_games=3,
            num_epochs=4,
            seed=9,
            config_json="{}",
        ),
        failure="b is lost",
        revision=7,
        end_time_s=0.0,
    )
    told = match_codec.encode_seat(Seat(match, "token"))
    assert (told.lease_token, told.match.name) == ("token", "projects/default/matches/m")
    message = told.match
    assert (message.state, message.turn_order) == (
        Message.STATE_RUNNING,
        Message.TURN_ORDER_FIXED,
    )
    assert (message.policy, message.rotates_first_agent, message.min_members) == (
        Message.POLICY_WAIT,
        True,
        2,
    )
    assert (message.num_games, message.num_epochs, message.seed) == (3, 4, 9)
    assert (message.lease_duration.seconds, message.turn_timeout.seconds) == (10, 30)
    assert (message.barrier_timeout.seconds, message.config_json) == (60, "{}")
    assert message.next_barrier == Barrier(epoch=1, point=Barrier.POINT_ROLLOUT_END)
    assert (message.num_open_games, message.failure, message.revision) == (2, "b is lost", 7)
    assert message.create_time.seconds == 1000
    # A time of 0 is one.
    assert message.HasField("end_time")
    assert [agent.state for agent in message.agents][1:] == [
        Agent.STATE_LOST,
        Agent.STATE_DROPPED,
    ]
    first = message.agents[0]
    assert (first.agent, first.model, first.num_joins) == ("a", "m", 1)
    assert first.lease_expire_time.seconds == 1010
    still_open = match_codec.encode_match(make_match((J, 0), (N, -1)))
    assert not still_open.HasField("end_time")
    assert still_open.agents[1].state == Agent.STATE_ABSENT


RUNNING, PENDING = Agent.STATE_RUNNING, Agent.STATE_PENDING
PLAYING = make_match((J, 0), (J, 0), num_opened=IN_ROLLOUT, num_open_games=1)


@pytest.mark.parametrize(
    ("match", "movers", "words", "states"),
    [
        (make_match((J, -1), (N, -1), state=GATHERING), "", "b to join", [PENDING]),
        (PLAYING, "b", "b to move in 1 game", [PENDING, RUNNING]),
        (PLAYING, "ab", "a, b to move in 1 game", [RUNNING, RUNNING]),
        (replace(PLAYING, num_open_games=2), "", "agents to move in 2 games", [PENDING, PENDING]),
        (
            make_match((J, 1), (J, 0), num_opened=IN_ROLLOUT),
            "",
            "b to arrive at the rollout end of epoch 0",
            [PENDING, RUNNING],
        ),
        (make_match((J, 0), (J, 0), state=MatchState.COMPLETED), "a", "", []),
    ],
)
def test_a_match_says_what_it_waits_for(
    match: Match, movers: str, words: str, states: list[Any]
) -> None:
    told = match_codec.encode_match(match, frozenset(movers))
    assert told.waiting_for == words
    assert [agent.state for agent in told.agents][: len(states)] == states


def test_what_changed_is_told_with_games_and_moves() -> None:
    game = Game(
        epoch=1,
        game=2,
        state=GameState.ABANDONED,
        turn=3,
        running=("b",),
        rewards={"a": 0.5},
        failure="given up",
        revision=7,
    )
    move = Move(epoch=1, game=2, turn=3, agent="a", action_json="4")
    told = match_codec.encode_update(MatchUpdate(PLAYING, (game,), (move,), 8), frozenset("b"))
    assert (told.revision, told.match.waiting_for) == (8, "b to move in 1 game")
    assert told.games[0] == coordinator_pb2.Game(
        epoch=1,
        game=2,
        state=coordinator_pb2.Game.STATE_ABANDONED,
        turn=3,
        running_agents=["b"],
        rewards={"a": 0.5},
        failure="given up",
        revision=7,
    )
    assert told.turns[0] == coordinator_pb2.Turn(
        epoch=1, game=2, turn=3, agent="a", action_json="4"
    )
