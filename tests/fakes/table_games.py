"""Two small games of two agents: Nim in turns, and matching pennies at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith import Observation


class Nim:
    """Take one to three stones; the agent that takes the last one wins."""

    def __init__(self, agents: Sequence[str], num_stones: int = 7, *, first: int = 0) -> None:
        self._agents = tuple(agents)
        self._num_stones = num_stones
        self._next = first
        self._winner = ""

    @property
    def next_agents(self) -> tuple[str, ...]:
        return () if self._winner else (self._agents[self._next],)

    @property
    def rewards(self) -> Mapping[str, float]:
        if not self._winner:
            return {}
        return {agent: 1.0 if agent == self._winner else -1.0 for agent in self._agents}

    def observe(self, agent: str) -> Observation:
        return Observation(messages=[{"role": "user", "content": f"{self._num_stones} stones"}])

    def apply(self, actions: Mapping[str, Any]) -> None:
        [(agent, text)] = actions.items()
        self._next = (self._next + 1) % len(self._agents)
        number = int(text) if str(text).isdigit() else 0
        if not 1 <= number <= min(3, self._num_stones):
            self._winner = self._agents[self._next]
            return
        self._num_stones -= number
        if not self._num_stones:
            self._winner = agent


class Pennies:
    """Each agent shows a side; the first one wins if the sides are equal. Several rounds."""

    def __init__(self, agents: Sequence[str], num_rounds: int = 3) -> None:
        self._agents = tuple(agents)
        self._left = num_rounds
        self._score = 0
        self.seen: list[Mapping[str, Any]] = []

    @property
    def next_agents(self) -> tuple[str, ...]:
        return self._agents if self._left else ()

    @property
    def rewards(self) -> Mapping[str, float]:
        first, second = self._agents
        return {first: float(self._score), second: float(-self._score)}

    def observe(self, agent: str) -> Observation:
        return Observation(messages=[{"role": "user", "content": f"{self._left} rounds"}])

    def apply(self, actions: Mapping[str, Any]) -> None:
        first, second = (actions[agent] for agent in self._agents)
        self._score += 1 if first == second else -1
        self._left -= 1
        self.seen.append(dict(actions))
