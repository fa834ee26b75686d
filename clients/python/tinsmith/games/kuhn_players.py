"""Scripted players of Kuhn poker.

- `random` bets or passes with equal chances.
- `honest` bets and calls with the king alone, and bets the queen in second place after a pass.
- `equilibrium` plays the best there is: nothing wins against it on average.

Equal seeds play equal games.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal, get_args

from tinsmith.games.kuhn import BET, PASS, KuhnGame, information_set

KuhnStrength = Literal["random", "honest", "equilibrium"]
KUHN_STRENGTHS: tuple[KuhnStrength, ...] = get_args(KuhnStrength)

_HONEST = {"K": 1.0, "Q pass": 1.0, "K pass": 1.0, "K bet": 1.0, "K pass bet": 1.0}
_EQUILIBRIUM = {
    "J": 1 / 3,
    "K": 1.0,
    "Q pass bet": 2 / 3,
    "K pass bet": 1.0,
    "J pass": 1 / 3,
    "K pass": 1.0,
    "Q bet": 1 / 3,
    "K bet": 1.0,
}
"""Of the first seat the one of its family that bluffs most. Source: H. W. Kuhn, 1950."""


class KuhnPlayer:
    """A script that plays Kuhn poker from either seat."""

    def __init__(self, strength: KuhnStrength = "equilibrium", *, seed: int = 0) -> None:
        if strength not in KUHN_STRENGTHS:
            raise ValueError(f"strength is {strength!r}; take one of {', '.join(KUHN_STRENGTHS)}")
        self._policy = policy_of(strength)
        self._random = random.Random(f"player:{seed}")

    async def choose_move(self, game: KuhnGame, agent: str) -> str:
        """Return `bet` or `pass`."""
        known = information_set(game.card_of(agent), game.history)
        return BET if self._random.random() < self._policy[known] else PASS


def policy_of(strength: KuhnStrength) -> Mapping[str, float]:
    """Return the probability to bet at each information set of both seats."""
    histories = ((), (PASS,), (BET,), (PASS, BET))
    names = [information_set(card, history) for card in range(3) for history in histories]
    if strength == "random":
        return dict.fromkeys(names, 0.5)
    chances = _HONEST if strength == "honest" else _EQUILIBRIUM
    return {name: chances.get(name, 0.0) for name in names}
