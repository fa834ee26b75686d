"""Two small games in the form of PettingZoo: one with turns, one with moves at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces
from pettingzoo import AECEnv, ParallelEnv


class Nim(AECEnv[str, Any, Any]):
    """Takes 1 to 3 of some stones; the one that takes the last wins."""

    metadata = {"name": "nim"}  # noqa: RUF012 - as the library declares it.

    def __init__(self, num_stones: int = 4) -> None:
        self.possible_agents = ["player_0", "player_1"]
        self._num_stones = num_stones

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents = list(self.possible_agents)
        self.stones = self._num_stones + (seed or 0)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def action_space(self, agent: str) -> Any:
        return gym_spaces.Discrete(3, start=1)

    def observe(self, agent: str) -> Any:
        legal = np.array([count <= self.stones for count in (1, 2, 3)], dtype=np.int8)
        return {"stones": self.stones, "action_mask": legal}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._clear_rewards()
        [other] = [each for each in self.possible_agents if each != agent]
        self.stones -= int(action)
        if not self.stones:
            self.rewards = {agent: 1.0, other: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = other
        self._accumulate_rewards()
        self._deads_step_first()


class Matching(ParallelEnv[str, Any, Any]):
    """Both name a number, twice: the first wins where they match."""

    metadata = {"name": "matching"}  # noqa: RUF012 - as the library declares it.

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents = ["a", "b"]
        self.round = 0
        return {"a": 0, "b": 0}, {"a": {}, "b": {}}

    def action_space(self, agent: str) -> Any:
        return gym_spaces.Discrete(2)

    def step(self, actions: dict[str, Any]) -> Any:
        self.round += 1
        gain = 1.0 if actions["a"] == actions["b"] else -1.0
        over = self.round == 2
        ends = {"a": over, "b": over}
        if over:
            self.agents = []
        shown = {"a": self.round, "b": self.round}
        return shown, {"a": gain, "b": -gain}, ends, {"a": False, "b": False}, {"a": {}, "b": {}}
