"""The match that a recipe's policies play: opened once for each part of a run, and gone with it.

The coordinator keeps the policies in step: no policy plays before all have trained, and none trains
before all games are over. Every policy has a seat of its own, by its own client. A game that broke
off teaches nothing to either side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType

from tinsmith.errors import TinsmithError
from tinsmith.games import AgentGame
from tinsmith.matches import MatchSpec, Member, play
from tinsmith.recipes.agents import RecipeAgent
from tinsmith.rollouts import NoRolloutsError, RolloutRunner, SamplerFailedError, Trajectory

_LOG = logging.getLogger(__name__)

MakeGame = Callable[[Sequence[str], int], AgentGame]
"""Returns a game at its beginning: the agents in their order, and a seed."""


@dataclass(frozen=True, slots=True)
class PlayedSeat:
    """One side of a game that came to an end.

    Attributes:
        seed: Of the game.
        position: Of the agent in the order of turns; 0 begins.
        trajectory: What the agent saw, said and earned.
    """

    seed: int
    position: int
    trajectory: Trajectory


class MatchTable(AbstractContextManager["MatchTable"]):
    """Seats for policies that play each other.

    Args:
        agents: The policies, in the order of turns.
        num_games: Games of a step; the first move passes from game to game.
        turn_timeout_s: A game with a later turn is abandoned.
        seed: Noted in the match, for people.
    """

    def __init__(
        self,
        agents: Sequence[RecipeAgent],
        *,
        num_games: int,
        turn_timeout_s: float,
        seed: int,
    ) -> None:
        self._agents = tuple(agents)
        self._num_games = num_games
        self._spec = MatchSpec(
            agents=[agent.name for agent in agents],
            models={agent.name: agent.base_model for agent in agents},
            rotates_first_agent=True,
            num_games=num_games,
            seed=seed,
            turn_timeout_s=turn_timeout_s,
        )
        self._members: list[Member] = []
        self._epoch = 0
        self._is_updating = False

    def __enter__(self) -> MatchTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        members, self._members = self._members, []
        for agent, member in zip(self._agents, members, strict=False):
            # A match of which nothing is left to keep is no reason to fail.
            with suppress(TinsmithError):
                agent.client.matches.cancel(member.match.name)
            with suppress(TinsmithError):
                member.leave()

    def play(
        self,
        runners: Mapping[str, RolloutRunner],
        make_game: MakeGame,
        seeds: Sequence[int],
        *,
        key: str,
    ) -> dict[str, list[PlayedSeat]]:
        """Play the games of a step, and return each policy's sides that came to an end.

        Args:
            runners: Plays for a policy, by its name.
            make_game: Makes each policy's copy of a game.
            seeds: One of each game.
            key: Tells this step's random draws from those of others.

        Raises:
            NoRolloutsError: If no game came to an end.
            TinsmithError: If the coordinator cannot be reached, or ended the match.
        """
        if not self._members:
            match = self._agents[0].client.matches.create(self._spec)
            self._members = [
                agent.client.matches.join(match.name, agent.name) for agent in self._agents
            ]
        return asyncio.run(self._play(runners, make_game, seeds, key))

    def end_update(self) -> None:
        """Note that all policies have trained; outside of a match, and again, it does nothing."""
        if self._is_updating:
            asyncio.run(self._arrive("update_end"))
            self._is_updating = False
            self._epoch += 1

    async def _play(
        self,
        runners: Mapping[str, RolloutRunner],
        make_game: MakeGame,
        seeds: Sequence[int],
        key: str,
    ) -> dict[str, list[PlayedSeat]]:
        await self._arrive("rollout_start")
        played = await asyncio.gather(
            *(
                self._play_game(member, runners[member.agent], make_game, number, seed, key)
                for member in self._members
                for number, seed in enumerate(seeds)
            )
        )
        await self._arrive("rollout_end")
        await self._arrive("update_start")
        self._is_updating = True
        found: dict[str, list[PlayedSeat]] = {member.agent: [] for member in self._members}
        for agent, seat in played:
            if seat is not None and not seat.trajectory.reason.is_infrastructure:
                found[agent].append(seat)
        if not any(found.values()):
            raise NoRolloutsError("no game of the match came to an end")
        return found

    async def _play_game(
        self,
        member: Member,
        runner: RolloutRunner,
        make_game: MakeGame,
        number: int,
        seed: int,
        key: str,
    ) -> tuple[str, PlayedSeat | None]:
        """Play one side of a game; nothing comes of it where the policy could not be sampled."""
        names = self._spec.agents
        first = number % len(names)
        order = [*names[first:], *names[:first]]
        game = make_game(order, seed)
        try:
            # What ends early gives the game up, so that the other side does not wait.
            trajectory = await runner.run(
                lambda: play(member, self._epoch, number, game),
                episode_key=f"{key}/{number}/{member.agent}",
            )
        except SamplerFailedError as error:
            _LOG.warning("game given up", extra={"agent": member.agent, "error": str(error)})
            return member.agent, None
        return member.agent, PlayedSeat(seed, order.index(member.agent), trajectory)

    async def _arrive(self, point: str) -> None:
        arriving = [member.arrive_async(point, self._epoch) for member in self._members]
        await asyncio.gather(*arriving)
