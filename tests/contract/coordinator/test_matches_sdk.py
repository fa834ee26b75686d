"""Two agents that play a match through the SDK, each with a client of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import pettingzoo_games
from tests.fakes.episode_services import Services
from tests.fakes.table_games import Nim, Pennies

import tinsmith
from tinsmith.games.pettingzoo import PettingZooGame
from tinsmith.matches import GameAbandonedError, MatchSpec, Member, play

BOTH = ("black", "white")


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    yield services
    services.stop()


@pytest.fixture
def clients(services: Services) -> Iterator[list[tinsmith.Client]]:
    retry = tinsmith.RetryPolicy(budget_s=20, initial_backoff_s=0.02, max_backoff_s=0.2)
    clients = [
        tinsmith.Client(
            services.scheduler.address, services.key, retry=retry, operation_timeout_s=20
        )
        for _ in BOTH
    ]
    yield clients
    for client in clients:
        client.close()


async def join(clients: list[tinsmith.Client], spec: MatchSpec) -> list[Member]:
    match = await clients[0].matches.create_async(spec)
    return [
        await client.matches.join_async(match.name, agent)
        for client, agent in zip(clients, BOTH, strict=True)
    ]


async def play_out(
    member: Member, epoch: int, number: int, game: Any, policy: Callable[[int], Any]
) -> tuple[float, int]:
    """Play a game to its end; return its reward and the number of moves."""
    instance = await play(member, epoch, number, game)
    reward, turns, done = 0.0, 0, False
    while not done:
        result = await instance.step_async(policy(turns))
        reward, done, turns = reward + result.reward, result.done, turns + 1
    await instance.delete_async()
    return reward, turns


async def test_two_agents_play_epochs_of_games_in_turns(clients: list[tinsmith.Client]) -> None:
    spec = MatchSpec(agents=BOTH, num_games=8, num_epochs=2, rotates_first_agent=True, seed=3)
    members = await join(clients, spec)
    rewards: dict[str, list[float]] = {agent: [] for agent in BOTH}

    async def run(member: Member) -> None:
        async with member:
            for epoch in member.epochs():
                async with epoch.rollout():
                    games = [
                        play_out(
                            member, epoch.index, number, Nim(BOTH, first=number % 2), lambda _: "1"
                        )
                        for number in range(8)
                    ]
                    rewards[member.agent] += [each for each, _ in await asyncio.gather(*games)]
                async with epoch.update():
                    pass

    await asyncio.gather(*(run(member) for member in members))
    # Seven stones, one at a time: the agent that begins takes the last one.
    assert rewards == {"black": [1.0, -1.0] * 8, "white": [-1.0, 1.0] * 8}
    assert (await clients[0].matches.get_async(members[0].match.name)).state == "completed"


async def test_moves_at_once_and_an_outcome_that_both_state(
    clients: list[tinsmith.Client],
) -> None:
    spec = MatchSpec(agents=BOTH, turn_order="simultaneous")
    members = await join(clients, spec)
    copies = [Pennies(BOTH), Pennies(BOTH)]

    async def run(member: Member, game: Pennies, sides: str) -> tuple[float, int]:
        await member.arrive_async("rollout_start", 0)
        return await play_out(member, 0, 0, game, lambda turn: sides[turn])

    answers = await asyncio.gather(
        run(members[0], copies[0], "HHT"), run(members[1], copies[1], "HTT")
    )
    assert answers == [(1.0, 3), (-1.0, 3)]
    assert copies[0].seen == copies[1].seen
    assert copies[0].seen[1] == {"black": "H", "white": "T"}


async def test_an_agent_that_gives_up_leaves_no_defeat_behind(
    clients: list[tinsmith.Client],
) -> None:
    members = await join(clients, MatchSpec(agents=BOTH))

    async def give_up() -> None:
        await members[0].arrive_async("rollout_start", 0)
        instance = await play(members[0], 0, 0, Nim(BOTH))
        await instance.delete_async()

    async def wait() -> None:
        await members[1].arrive_async("rollout_start", 0)
        with pytest.raises(GameAbandonedError, match="black gave it up"):
            await play(members[1], 0, 0, Nim(BOTH))

    await asyncio.gather(give_up(), wait())


async def test_a_claim_that_the_moves_deny_ends_the_game(clients: list[tinsmith.Client]) -> None:
    members = await join(clients, MatchSpec(agents=BOTH))

    async def lie() -> None:
        await members[0].arrive_async("rollout_start", 0)
        await members[0].wait_for_begin_async(0, 0)
        rewards = {"black": 1.0, "white": -1.0}
        await members[0].take_turn_async(0, 0, 0, "1", rewards=rewards)

    async def see() -> None:
        await members[1].arrive_async("rollout_start", 0)
        with pytest.raises(GameAbandonedError, match="by the moves it is not"):
            await play(members[1], 0, 0, Nim(BOTH))

    await asyncio.gather(lie(), see())


async def test_an_agent_that_joins_again_goes_on_in_its_game(
    clients: list[tinsmith.Client],
) -> None:
    members = await join(clients, MatchSpec(agents=BOTH, lease_s=3600))
    name = members[0].match.name
    both = [member.arrive_async("rollout_start", 0) for member in members]
    await asyncio.gather(*both)
    first = await play(members[0], 0, 0, Nim(BOTH))
    stepping = asyncio.create_task(first.step_async("3"))
    second = await play(members[1], 0, 0, Nim(BOTH))
    answering = asyncio.create_task(second.step_async("1"))
    await stepping
    await members[0].leave_async("restarted")
    again = await clients[0].matches.join_async(name, "black")
    resumed = await play(again, 0, 0, Nim(BOTH))
    assert resumed.observation.messages[0]["content"] == "3 stones"
    result = await resumed.step_async("3")
    assert (result.reward, result.done) == (1.0, True)
    assert (await answering).reward == -1.0


async def test_a_game_that_waits_for_a_player_that_is_not_there_is_given_up(
    clients: list[tinsmith.Client],
) -> None:
    members = await join(clients, MatchSpec(agents=BOTH))
    await asyncio.gather(*(member.arrive_async("rollout_start", 0) for member in members))
    # Black's copy is of a game with another player.
    with pytest.raises(GameAbandonedError, match="it waits for red, and the match has black, whi"):
        await play(members[0], 0, 0, Nim(("red", "black")))
    with pytest.raises(GameAbandonedError, match="black gave it up: it waits for red"):
        await play(members[1], 0, 0, Nim(BOTH))


def test_matches_are_listed_and_cancelled(clients: list[tinsmith.Client]) -> None:
    match = clients[0].matches.create(MatchSpec(agents=BOTH, config={"size": 9}))
    assert match.config == {"size": 9}
    with clients[0].matches.join(match.name, "black") as member:
        assert [each.name for each in clients[1].matches.list()] == [match.name]
        assert clients[1].matches.cancel(match.name).state == "cancelled"
        with pytest.raises(tinsmith.FailedPreconditionError, match="is cancelled"):
            member.arrive("rollout_start", 0)
    with pytest.raises(tinsmith.InvalidArgumentError, match=r"match\.agents must be 2 to 64"):
        clients[0].matches.create(MatchSpec(agents=["alone"]))
    with pytest.raises(ValueError, match="turn_order must be one of"):
        clients[0].matches.create(MatchSpec(agents=BOTH, turn_order="random"))


@pytest.mark.parametrize(
    ("turn_order", "make", "expected"),
    [
        # Five stones, one at a time.
        pytest.param("fixed", lambda: pettingzoo_games.Nim(5), [(1.0, 3), (-1.0, 2)], id="aec"),
        pytest.param(
            "simultaneous", pettingzoo_games.Matching, [(2.0, 2), (-2.0, 2)], id="parallel"
        ),
    ],
)
async def test_games_of_pettingzoo_are_matches(
    clients: list[tinsmith.Client],
    turn_order: str,
    make: Callable[[], Any],
    expected: list[tuple[float, int]],
) -> None:
    members = await join(clients, MatchSpec(agents=BOTH, turn_order=turn_order))

    async def run(member: Member) -> tuple[float, int]:
        await member.arrive_async("rollout_start", 0)
        return await play_out(member, 0, 0, PettingZooGame(make(), BOTH), lambda _: "1")

    async with asyncio.timeout(60):
        assert await asyncio.gather(*(run(member) for member in members)) == expected
