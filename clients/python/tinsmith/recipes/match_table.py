"""The match that a recipe's policies play: opened once for each part of a run, and gone with it.

The coordinator keeps the policies in step: no policy plays before all have trained, and none trains
before all games are over. Every policy has a seat of its own, by its own client. A game that broke
off teaches nothing to either side. A seat may be a script's or a frozen checkpoint's: it is a
member like the others, and learns nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType

from tinsmith.client import Client
from tinsmith.errors import TinsmithError
from tinsmith.games import AgentGame, Player
from tinsmith.matches import GameAbandonedError, MatchSpec, Member, play
from tinsmith.recipes.agents import RecipeAgent
from tinsmith.recipes.tasks.agent_games import AT_ONCE
from tinsmith.rollouts import NoRolloutsError, RolloutRunner, SamplerFailedError, Trajectory

_LOG = logging.getLogger(__name__)

MakeGame = Callable[[Sequence[str], int], AgentGame]
"""Returns a game at its beginning: the agents in their order, and a seed."""
MakePlayer = Callable[[int, str], Player]
"""Returns what plays a seat that does not learn, by the game's seed and key."""

OPPONENT = "opponent"
"""Name of the seat that does not learn."""


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
        opponent: Plays one seat more, the last one; None where all seats learn.
        order: Of moves, one of `ORDERS`.
        num_games: Games of a step.
        turn_timeout_s: A game with a later turn is abandoned.
        seed: Noted in the match, for people.
    """

    def __init__(
        self,
        agents: Sequence[RecipeAgent],
        *,
        opponent: MakePlayer | None = None,
        order: str,
        num_games: int,
        turn_timeout_s: float,
        seed: int,
    ) -> None:
        self._agents = tuple(agents)
        self._opponent = opponent
        self._spec = MatchSpec(
            agents=[*(agent.name for agent in agents), *([OPPONENT] if opponent else [])],
            models={agent.name: agent.base_model for agent in agents},
            turn_order=order if order in (AT_ONCE, "custom") else "fixed",
            rotates_first_agent=order != "fixed",
            num_games=num_games,
            seed=seed,
            turn_timeout_s=turn_timeout_s,
        )
        self._members: list[Member] = []
        self._epoch = 0
        self._is_updating = False
        self._problems: Counter[str] = Counter()

    def __enter__(self) -> MatchTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        members, self._members = self._members, []
        for client, member in zip(self._clients, members, strict=False):
            # A match of which nothing is left to keep is no reason to fail.
            with suppress(TinsmithError):
                client.matches.cancel(member.match.name)
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
            NoRolloutsError: If no game came to an end; the message counts the reasons.
            TinsmithError: If the coordinator cannot be reached, or ended the match.
        """
        if not self._members:
            match = self._clients[0].matches.create(self._spec)
            self._members = [
                client.matches.join(match.name, name)
                for client, name in zip(self._clients, self._spec.agents, strict=True)
            ]
        return asyncio.run(self._play(runners, make_game, seeds, key))

    def end_update(self) -> None:
        """Note that all policies have trained; outside of a match, and again, it does nothing."""
        if self._is_updating:
            asyncio.run(self._arrive("update_end"))
            self._is_updating = False
            self._epoch += 1

    @property
    def _clients(self) -> list[Client]:
        """The client of each seat; the first policy's holds that of the opponent."""
        clients = [agent.client for agent in self._agents]
        return [*clients, *clients[:1]] if self._opponent else clients

    async def _play(
        self,
        runners: Mapping[str, RolloutRunner],
        make_game: MakeGame,
        seeds: Sequence[int],
        key: str,
    ) -> dict[str, list[PlayedSeat]]:
        await self._arrive("rollout_start")
        self._problems.clear()
        played = await asyncio.gather(
            *(
                self._play_game(member, runners.get(member.agent), make_game, number, seed, key)
                for member in self._members
                for number, seed in enumerate(seeds)
            )
        )
        await self._arrive("rollout_end")
        await self._arrive("update_start")
        self._is_updating = True
        found: dict[str, list[PlayedSeat]] = {agent.name: [] for agent in self._agents}
        for agent, seat in played:
            if seat is None:
                continue
            if seat.trajectory.reason.is_infrastructure:
                # So ends a game that the other side forfeits first; no reason to warn.
                self._problems[f"{agent}: {seat.trajectory.failure}"] += 1
            else:
                found[agent].append(seat)
        if not any(found.values()):
            raise NoRolloutsError(
                f"not one of {len(seeds)} games of the match came to an end; "
                f"problems and how often: {dict(self._problems.most_common(3))}"
            )
        return found

    async def _play_game(
        self,
        member: Member,
        runner: RolloutRunner | None,
        make_game: MakeGame,
        number: int,
        seed: int,
        key: str,
    ) -> tuple[str, PlayedSeat | None]:
        """Play one side of a game; nothing comes of it where the policy could not be sampled."""
        names = self._spec.agents
        first = number % len(names) if self._spec.rotates_first_agent else 0
        order = [*names[first:], *names[:first]]
        game = make_game(order, seed)
        if runner is None:
            await self._play_opponent(member, game, number, seed, key)
            return member.agent, None
        try:
            # What ends early gives the game up, so that the other side does not wait.
            trajectory = await runner.run(
                lambda: play(member, self._epoch, number, game),
                episode_key=f"{key}/{number}/{member.agent}",
            )
        except SamplerFailedError as error:
            self._note_problem(member.agent, str(error))
            return member.agent, None
        return member.agent, PlayedSeat(seed, order.index(member.agent), trajectory)

    async def _play_opponent(
        self, member: Member, game: AgentGame, number: int, seed: int, key: str
    ) -> None:
        """Play the side of a game that does not learn."""
        assert self._opponent is not None, "a seat without a policy is the opponent's"
        player = self._opponent(seed, f"{key}/{number}/{OPPONENT}")
        # A game that broke off is counted where a policy lost it.
        with suppress(GameAbandonedError):
            instance = await play(member, self._epoch, number, game)
            try:
                is_over = False
                while not is_over:
                    try:
                        move = await player.choose_move(game, member.agent)
                    except TinsmithError as error:
                        # As of a policy: the game is given up, and the next ones are played.
                        self._note_problem(OPPONENT, str(error))
                        return
                    is_over = (await instance.step_async(move)).done
            finally:
                await instance.delete_async()

    def _note_problem(self, agent: str, problem: str) -> None:
        """Count why a side was given up, and log it where it is new in this step."""
        said = f"{agent}: {problem}"
        self._problems[said] += 1
        if self._problems[said] == 1:
            _LOG.warning("game given up by %s", said)

    async def _arrive(self, point: str) -> None:
        arriving = [member.arrive_async(point, self._epoch) for member in self._members]
        await asyncio.gather(*arriving)
