"""A game at one table: one agent learns, the others are played by scripts or fixed policies.

The table is an environment of rollouts. It lives in the learner's process and needs no match; what
the other seats answer is not trained on. An opponent that fails ends the episode by an error, so
that it is replaced and never taken for a victory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.environments.environment_calls import Observation, StepResult
from tinsmith.games.agent_game import AgentGame, Player


class GameOverError(ValueError):
    """A game ended before the agent that learns had a turn: the others forfeited it."""


class TableInstance:
    """One game from the seat of one agent; see `sit_down`."""

    def __init__(self, game: AgentGame, agent: str, players: Mapping[str, Player]) -> None:
        self._game = game
        self._agent = agent
        self._players = dict(players)
        self._num_turns = 0
        self._paid = 0.0
        self.observation = Observation()
        """What the game shows before the agent's first move."""

    @property
    def game(self) -> AgentGame:
        """The game that is played."""
        return self._game

    async def begin(self) -> None:
        """Let the other seats move until it is the agent's turn.

        Raises:
            GameOverError: If the game ends before.
        """
        await self._let_others_move({})
        if not self._game.next_agents:
            raise GameOverError(f"the game is over before {self._agent} moves")
        self.observation = self._game.observe(self._agent)

    async def step_async(self, text: Any) -> StepResult:
        """Make a move, and let the others move until the agent's next turn or the end."""
        await self._let_others_move({self._agent: text})
        reward = float(self._game.rewards.get(self._agent, 0.0))
        step_reward, self._paid = reward - self._paid, reward
        return StepResult(
            observation=self._game.observe(self._agent),
            reward=step_reward,
            done=not self._game.next_agents,
            info={"turn": self._num_turns},
        )

    async def delete_async(self) -> None:
        """Leave the table; no other program waits for it."""

    async def _let_others_move(self, actions: dict[str, Any]) -> None:
        while next_agents := self._game.next_agents:
            for agent in next_agents:
                if agent in actions:
                    continue
                if agent == self._agent:
                    return
                actions[agent] = await self._players[agent].choose_move(self._game, agent)
            self._game.apply({agent: actions.pop(agent) for agent in next_agents})
            self._num_turns += 1


async def sit_down(game: AgentGame, agent: str, players: Mapping[str, Player]) -> TableInstance:
    """Return a game as the environment of a rollout, once it is the agent's turn.

    Args:
        game: A game at its beginning.
        agent: The seat that learns.
        players: What plays each other seat.

    Raises:
        GameOverError: If the game ends before the agent's first turn.

    Example:
        >>> game = GomokuGame(("black", "white"), GomokuRules(5, 4))
        >>> runner.run(lambda: sit_down(game, "black", {"white": GomokuPlayer("greedy")}))
    """
    instance = TableInstance(game, agent, players)
    await instance.begin()
    return instance
