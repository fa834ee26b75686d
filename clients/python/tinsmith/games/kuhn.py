"""Kuhn poker: the smallest game of bluff, and one whose value is known.

Three cards, one for each of two agents, one chip each in the pot. An agent bets one chip or passes;
after a bet, betting calls it and passing folds. With both playing their best the first agent loses
1/18 of a chip in a game. Source: H. W. Kuhn, "A simplified two-person poker", 1950.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.environments.environment_calls import Observation

CARDS = ("J", "Q", "K")
"""Lowest first."""
BET, PASS = "bet", "pass"
VALUE = -1.0 / 18.0
"""What the game is worth to the first agent when both play their best."""

_BETS = ("bet", "call")
_PASSES = ("pass", "check", "fold")


class KuhnGame:
    """One game of two agents; `deal` has the index of each one's card in `CARDS`."""

    def __init__(self, agents: Sequence[str], deal: tuple[int, int]) -> None:
        if len(set(agents)) != 2 or len(agents) != 2:
            raise ValueError(f"Kuhn poker has two agents of different names, not {list(agents)}")
        if len(set(deal)) != 2 or not set(deal) <= {0, 1, 2}:
            raise ValueError(f"deal is {deal}; it has two different numbers of 0, 1, 2")
        self.deal = tuple(deal)
        self.history: tuple[str, ...] = ()
        """Moves so far, each `bet` or `pass`."""
        self._agents = tuple(agents)
        self.forfeited_by = ""
        """The agent whose text was no move; empty while there is none."""

    @classmethod
    def dealt(cls, agents: Sequence[str], seed: int) -> KuhnGame:
        """Return a game with cards drawn by a seed; equal seeds deal equal cards."""
        first, second = random.Random(f"deal:{seed}").sample(range(3), 2)
        return cls(agents, (first, second))

    @property
    def next_agents(self) -> tuple[str, ...]:
        """The agent that moves now; none once the game is over."""
        return () if self._is_over else (self._agents[len(self.history) % 2],)

    @property
    def rewards(self) -> Mapping[str, float]:
        """Chips won, negative for the loser; empty while the game goes on.

        Text that is no move forfeits what a called bet would cost, 2 chips.
        """
        if not self._is_over:
            return {}
        first, second = self._agents
        if self.forfeited_by:
            gain = -2.0 if self.forfeited_by == first else 2.0
        elif self.history[-2:] == (BET, PASS):
            gain = 1.0 if len(self.history) == 2 else -1.0
        else:
            stake = 2.0 if BET in self.history else 1.0
            gain = stake if self.deal[0] > self.deal[1] else -stake
        return {first: gain, second: -gain}

    def card_of(self, agent: str) -> int:
        """Return the index of an agent's card in `CARDS`."""
        return self.deal[self._agents.index(agent)]

    def observe(self, agent: str) -> Observation:
        """Return the agent's own card and the moves so far, as a message."""
        if self._is_over:
            return Observation()
        card = CARDS[self.card_of(agent)]
        moves = " ".join(self.history) or "none"
        return Observation(messages=[{"role": "user", "content": f"card {card}, moves {moves}"}])

    def apply(self, actions: Mapping[str, Any]) -> None:
        """Bet or pass for the agent that is next.

        `call` is the same as bet; `check` and `fold` are the same as pass.

        Raises:
            ValueError: If the game is over, or it is another agent's turn.
        """
        if tuple(actions) != self.next_agents:
            raise ValueError(f"{list(self.next_agents)} moves now, not {list(actions)}")
        [(agent, text)] = actions.items()
        word = text.strip().lower() if isinstance(text, str) else ""
        if word not in _BETS + _PASSES:
            self.forfeited_by = agent
            return
        self.history = (*self.history, BET if word in _BETS else PASS)

    @property
    def _is_over(self) -> bool:
        if self.forfeited_by:
            return True
        ends = ((PASS, PASS), (BET, PASS), (BET, BET))
        return len(self.history) >= 2 and self.history[-2:] in ends


def best_response_value(policy: Mapping[str, float], *, seat: int) -> float:
    """Return the most that a seat can win against a fixed policy of the other seat.

    Args:
        policy: Probability to bet at each information set of the other seat, by its card and the
            moves so far: `"Q"`, `"J pass bet"`.
        seat: The seat that responds, 0 or 1.

    Returns:
        Chips in a game, on average over the six deals.

    A policy's exploitability is the sum over both seats; it is 0 for policies that play their best.
    """
    return max(
        _value_against(dict(zip(_decisions(seat), choices, strict=True)), policy, seat)
        for choices in _all_choices(len(_decisions(seat)))
    )


def expected_value(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Return what the first seat wins on average; policies as in `best_response_value`."""
    policies = (first, second)
    deals = [(a, b) for a in range(3) for b in range(3) if a != b]
    return sum(_value_of(deal, (), policies) for deal in deals) / len(deals)


def information_set(card: int, history: Sequence[str]) -> str:
    """Return the name of what an agent knows: its card and the moves so far."""
    return " ".join((CARDS[card], *history))


def _decisions(seat: int) -> list[str]:
    histories: Sequence[tuple[str, ...]] = ((), (PASS, BET)) if seat == 0 else ((PASS,), (BET,))
    return [information_set(card, history) for card in range(3) for history in histories]


def _all_choices(number: int) -> list[tuple[float, ...]]:
    return [tuple(float(bits >> place & 1) for place in range(number)) for bits in range(2**number)]


def _value_against(choices: Mapping[str, float], policy: Mapping[str, float], seat: int) -> float:
    if seat == 0:
        return expected_value(choices, policy)
    return -expected_value(policy, choices)


def _value_of(
    deal: tuple[int, int], history: tuple[str, ...], policies: Sequence[Mapping[str, float]]
) -> float:
    game = KuhnGame(("first", "second"), deal)
    game.history = history
    if not game.next_agents:
        return game.rewards["first"]
    seat = len(history) % 2
    chance = policies[seat][information_set(deal[seat], history)]
    bet = _value_of(deal, (*history, BET), policies) if chance > 0 else 0.0
    passed = _value_of(deal, (*history, PASS), policies) if chance < 1 else 0.0
    return chance * bet + (1.0 - chance) * passed
