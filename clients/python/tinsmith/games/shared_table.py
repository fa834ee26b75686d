"""A game whose every seat learns, in one process: each seat is an environment of a rollout.

It is a match without a coordinator. The seats share one game, and each waits inside its step until
it is its turn again. A seat that is given up before the end ends the game for all: what the others
would have earned is unknown, so their episodes fail and are never taken for victories.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tinsmith.environments.environment_calls import Observation, StepResult
from tinsmith.games.agent_game import AgentGame
from tinsmith.games.table import GameOverError


class SharedTable:
    """One game, and the seats at it.

    Args:
        game: A game at its beginning; it is played by its seats alone.

    Attributes:
        game: The same.
        failure: Why the game was given up; empty unless it was.
    """

    def __init__(self, game: AgentGame) -> None:
        self.game = game
        self.failure = ""
        self._actions: dict[str, Any] = {}
        self._changed = asyncio.Condition()

    @property
    def is_over(self) -> bool:
        """Whether the game came to its end."""
        return not self.game.next_agents

    @property
    def rewards(self) -> Mapping[str, float]:
        """What the game was worth to each seat."""
        return self.game.rewards

    async def sit_down(self, agent: str) -> SharedSeat:
        """Return a seat as the environment of a rollout, once it is its turn.

        Raises:
            GameOverError: If the game ends, or is given up, before.
        """
        seat = SharedSeat(self, agent)
        await self.wait_for_turn(agent)
        if self.is_over:
            raise GameOverError(f"the game is over before {agent} moves")
        seat.observation = self.game.observe(agent)
        return seat

    async def move(self, agent: str, action: Any) -> None:
        """Make a move; it takes effect once all agents of the turn have moved.

        Raises:
            ValueError: If it is not the agent's turn.
        """
        async with self._changed:
            if agent not in self.game.next_agents or agent in self._actions:
                raise ValueError(f"it is not {agent}'s turn")
            self._actions[agent] = action
            if set(self._actions) == set(self.game.next_agents):
                agents = self.game.next_agents
                self.game.apply({each: self._actions.pop(each) for each in agents})
                self._changed.notify_all()

    async def wait_for_turn(self, agent: str) -> None:
        """Return once it is an agent's turn, or the game is over.

        Raises:
            GameOverError: If the game was given up.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_ready(agent))
        if self.failure:
            raise GameOverError(self.failure)

    async def give_up(self, agent: str) -> None:
        """End the game for all, unless it is over."""
        async with self._changed:
            if not self.is_over and not self.failure:
                self.failure = f"{agent} left the game before its end"
                self._changed.notify_all()

    def _is_ready(self, agent: str) -> bool:
        is_turn = agent in self.game.next_agents and agent not in self._actions
        return bool(self.failure) or self.is_over or is_turn


class SharedSeat:
    """One seat of a shared table; see `SharedTable.sit_down`."""

    def __init__(self, table: SharedTable, agent: str) -> None:
        self._table = table
        self._agent = agent
        self._paid = 0.0
        self.observation = Observation()
        """What the game shows before the agent's first move."""

    async def step_async(self, action: Any) -> StepResult:
        """Move, and wait until it is this seat's turn again or the game is over.

        Raises:
            GameOverError: If another seat left before the end.
        """
        await self._table.move(self._agent, action)
        await self._table.wait_for_turn(self._agent)
        reward = float(self._table.rewards.get(self._agent, 0.0))
        step_reward, self._paid = reward - self._paid, reward
        return StepResult(
            observation=self._table.game.observe(self._agent),
            reward=step_reward,
            done=self._table.is_over,
            info={},
        )

    async def delete_async(self) -> None:
        """Leave the table."""
        await self._table.give_up(self._agent)
