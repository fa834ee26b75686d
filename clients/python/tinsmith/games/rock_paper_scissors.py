"""Rock, paper, scissors: the smallest game of moves at once; only a mixed policy holds it.

Both agents name a hand, by its word or its first letter. Paper beats rock, scissors beat paper,
rock beats scissors. With both playing their best each hand comes with a chance of a third, and the
game is worth nothing.

Scripted players, the weakest first: `constant` always shows rock, `biased` shows it half of the
time, and `random` draws all three alike: nothing wins against it on average.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from tinsmith.environments.environment_calls import Observation

HANDS = ("rock", "paper", "scissors")
"""Each is beaten by the one that follows, and the last by the first."""

RpsStrength = Literal["constant", "biased", "random"]
RPS_STRENGTHS: tuple[RpsStrength, ...] = get_args(RpsStrength)

_CHANCES: Mapping[RpsStrength, Sequence[float]] = {
    "constant": (1.0, 0.0, 0.0),
    "biased": (0.5, 0.25, 0.25),
    "random": (1 / 3, 1 / 3, 1 / 3),
}


class RockPaperScissorsGame:
    """One game of two agents that move at once."""

    def __init__(self, agents: Sequence[str]) -> None:
        if len(set(agents)) != 2 or len(agents) != 2:
            raise ValueError(f"the game has two agents of different names, not {list(agents)}")
        self.hands: Mapping[str, str] = {}
        """What each agent showed; empty for text that is no hand, and nothing before the end."""
        self._agents = tuple(agents)

    @property
    def next_agents(self) -> tuple[str, ...]:
        """Both agents; none once the game is over."""
        return () if self.hands else self._agents

    @property
    def rewards(self) -> Mapping[str, float]:
        """1 for the winner and -1 for the loser, 0 for equal hands; empty before the end.

        Text that is no hand loses to every hand.
        """
        if not self.hands:
            return {}
        first, second = (self.hands[agent] for agent in self._agents)
        gain = _gain(first, second)
        return {self._agents[0]: gain, self._agents[1]: -gain}

    def observe(self, agent: str) -> Observation:
        """Return the question, which says nothing of the other agent; nothing at the end."""
        del agent
        if self.hands:
            return Observation()
        return Observation(messages=[{"role": "user", "content": "r, p or s?"}])

    def apply(self, actions: Mapping[str, Any]) -> None:
        """Show the hands of both agents.

        Raises:
            ValueError: If the game is over, or not both move.
        """
        if not actions or set(actions) != set(self.next_agents):
            raise ValueError(f"{list(self.next_agents)} move now, not {list(actions)}")
        self.hands = {agent: _read(text) for agent, text in actions.items()}


class RpsPlayer:
    """A script that plays rock, paper, scissors; equal seeds show equal hands."""

    def __init__(self, strength: RpsStrength = "random", *, seed: int = 0) -> None:
        if strength not in RPS_STRENGTHS:
            raise ValueError(f"strength is {strength!r}; take one of {', '.join(RPS_STRENGTHS)}")
        self._chances = _CHANCES[strength]
        self._random = random.Random(f"player:{seed}")

    async def choose_move(self, game: RockPaperScissorsGame, agent: str) -> str:
        """Return the first letter of a hand, which any model writes as one token."""
        del game, agent
        return self._random.choices(HANDS, self._chances)[0][0]


def exploitability(policy: Mapping[str, float]) -> float:
    """Return the most that can be won in a game against a fixed policy, on average.

    Args:
        policy: Probability of each hand; what is missing to 1 is text that is no hand.

    Returns:
        0 for a policy that draws all hands alike, 1 for one that always shows the same.
    """
    shown = {**{hand: policy.get(hand, 0.0) for hand in HANDS}}
    shown[""] = 1.0 - sum(shown.values())
    return max(sum(chance * _gain(hand, each) for each, chance in shown.items()) for hand in HANDS)


def _gain(hand: str, other: str) -> float:
    if hand == other:
        return 0.0
    if not hand or not other:
        return 1.0 if hand else -1.0
    return 1.0 if (HANDS.index(hand) - HANDS.index(other)) % len(HANDS) == 1 else -1.0


def _read(text: Any) -> str:
    word = text.strip().lower() if isinstance(text, str) else ""
    return next((hand for hand in HANDS if word in (hand, hand[0])), "")
