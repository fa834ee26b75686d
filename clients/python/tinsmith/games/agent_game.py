"""What a game of several agents is, and what plays it.

A game is plain state: the same moves lead every copy to the same position. That is why a copy for
each agent needs no referee, and why a game can be replayed from its moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tinsmith.environments.environment_calls import Observation


class AgentGame(Protocol):
    """A game of several agents; the same moves lead every copy to the same position."""

    @property
    def next_agents(self) -> tuple[str, ...]:
        """Agents that move now; none once the game is over."""
        ...

    @property
    def rewards(self) -> Mapping[str, float]:
        """What the game has been worth to each agent so far."""
        ...

    def observe(self, agent: str) -> Observation:
        """Return what the game shows to an agent that is about to move, or at its end."""
        ...

    def apply(self, actions: Mapping[str, Any]) -> None:
        """Make the moves of one turn; a move that breaks the rules is for the game to judge."""
        ...


class Player(Protocol):
    """Something that moves in games: a script, a policy, or a checkpoint of one."""

    async def choose_move(self, game: Any, agent: str) -> Any:
        """Return a move for an agent that is among the game's next ones.

        Args:
            game: The game; a script may read its position, a policy reads `observe(agent)`.
            agent: The seat that the player has in this game.

        Raises:
            Exception: Whatever a policy raises; the game cannot go on then.
        """
        ...
