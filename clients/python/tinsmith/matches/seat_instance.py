"""A game of a match as the environment of a rollout, seen from the seat of one agent.

Every agent has a copy of the game and replays all moves in it. None needs a referee, and none can
claim what the copies of others deny: a claim that differs ends the game by an error. So does a game
that was abandoned. The episode is replaced then, and never taken for a defeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.environments.environment_calls import Observation, StepResult
from tinsmith.games import AgentGame
from tinsmith.matches.member import Member
from tinsmith.matches.types import MatchGame


class GameAbandonedError(RuntimeError):
    """A game that cannot be finished; it says nothing about how its agents play."""


class SeatInstance:
    """One game, from the seat of one agent; see `play`."""

    def __init__(self, member: Member, epoch: int, number: int, game: AgentGame) -> None:
        self._member = member
        self._epoch = epoch
        self._number = number
        self._game = game
        self._turn = 0
        self._num_known = 0
        self._sent_turn = -1
        self._paid = 0.0
        self._is_ended = False
        self._is_simultaneous = member.match.turn_order == "simultaneous"
        self.observation = Observation()
        """What the game shows before the agent's first move."""

    async def begin(self) -> None:
        """Wait for the agent's first turn.

        Raises:
            GameAbandonedError: If the game ended before.
            TinsmithError: If the seat is lost, or the match is over.
        """
        standing = await self._member.wait_for_begin_async(self._epoch, self._number)
        self._num_known = standing.turn
        if await self._follow():
            raise self._abandoned("it was over before the agent's first turn")
        self.observation = self._game.observe(self._member.agent)

    async def step_async(self, text: Any) -> StepResult:
        """Make a move, and wait for the next turn of the agent or the end of the game.

        Args:
            text: The move: anything that JSON can hold, and most often text.

        Raises:
            GameAbandonedError: If the game cannot be finished.
            TinsmithError: If the seat is lost, or the match is over.
        """
        if self._is_simultaneous:
            await self._send(text, is_over=False)
        else:
            self._game.apply({self._member.agent: text})
            await self._send(text, is_over=not self._game.next_agents)
            self._turn += 1
        is_over = await self._follow()
        reward = self._game.rewards.get(self._member.agent, 0.0)
        step_reward, self._paid = reward - self._paid, reward
        return StepResult(
            observation=self._game.observe(self._member.agent),
            reward=step_reward,
            done=is_over,
            info={"turn": self._turn},
        )

    async def delete_async(self) -> None:
        """Give the game up if it goes on; its other agents must not wait for this one."""
        if not self._is_ended:
            self._is_ended = True
            await self._member.abandon_async(
                self._epoch, self._number, "the agent's episode ended before the game"
            )

    async def _follow(self) -> bool:
        """Replay moves until it is the agent's turn; return whether the game is over instead."""
        while self._game.next_agents:
            if self._may_move():
                return False
            await self._require_players()
            found, moves = await self._member.wait_for_turn_async(
                self._epoch, self._number, self._turn
            )
            self._require_moves(found, moves)
            self._game.apply(moves)
            self._turn += 1
            self._require_agreement(found)
        if self._is_simultaneous:
            await self._send(None, is_over=True)
        self._is_ended = True
        return True

    def _may_move(self) -> bool:
        """Return whether the agent has a move to make, not one from before it joined again."""
        is_next = self._member.agent in self._game.next_agents
        return is_next and self._turn >= self._num_known and self._sent_turn != self._turn

    async def _send(self, action: Any, *, is_over: bool) -> None:
        is_custom = self._member.match.turn_order == "custom"
        next_agents = self._game.next_agents if is_custom and not is_over else ()
        game = await self._member.take_turn_async(
            self._epoch,
            self._number,
            self._turn,
            action,
            next_agents=next_agents,
            rewards=self._game.rewards if is_over else None,
        )
        self._sent_turn = self._turn
        if game.state == "abandoned":
            self._is_ended = True
            raise self._abandoned(game.failure)

    async def _require_players(self) -> None:
        """Give the game up where it waits for a player that the match has not, or has no more."""
        present = {each.agent for each in self._member.match.agents if each.state != "dropped"}
        absent = [agent for agent in self._game.next_agents if agent not in present]
        if absent:
            why = (
                f"it waits for {', '.join(absent)}, and the match has {', '.join(sorted(present))}"
            )
            self._is_ended = True
            await self._member.abandon_async(self._epoch, self._number, why)
            raise self._abandoned(why)

    def _require_moves(self, found: MatchGame, moves: Mapping[str, Any]) -> None:
        if not moves:
            self._is_ended = True
            raise self._abandoned(found.failure)

    def _require_agreement(self, found: MatchGame) -> None:
        """Hold what another agent said of the game's end against this copy."""
        if found.state != "over" or found.turn != self._turn:
            return
        self._is_ended = True
        if self._game.next_agents:
            raise self._abandoned("another agent says that it is over, and by the moves it is not")
        if not self._is_simultaneous and dict(found.rewards) != dict(self._game.rewards):
            raise self._abandoned(
                f"another agent says that it was worth {dict(found.rewards)}, and by the moves it "
                f"was worth {dict(self._game.rewards)}"
            )

    def _abandoned(self, why: str) -> GameAbandonedError:
        return GameAbandonedError(
            f"game {self._number} of epoch {self._epoch} of {self._member.match.name}: {why}"
        )


async def play(member: Member, epoch: int, number: int, game: AgentGame) -> SeatInstance:
    """Return a game as the environment of a rollout, once it is the agent's turn.

    Args:
        member: The seat.
        epoch: The epoch that is played.
        number: Of the game in the epoch.
        game: A copy of the game at its beginning.

    Raises:
        GameAbandonedError: If the game ended before the agent's first turn.
        TinsmithError: If the seat is lost, or the match is over.

    Example:
        >>> runner.run(lambda: play(member, epoch.index, 3, Gomoku(member.match.seed + 3)))
    """
    instance = SeatInstance(member, epoch, number, game)
    await instance.begin()
    return instance
