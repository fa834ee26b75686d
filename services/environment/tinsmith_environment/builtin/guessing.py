"""A number guessing game: several turns, an exact reward, no data needed.

The shaping reward of a wrong guess is the share of the numbers that it rules out. Its sum over an
episode cannot exceed `shaping`, however long the game. Winning soon stays the best policy while
`shaping` is below 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import ClassVar

from tinsmith_environment.environment import (
    Action,
    Environment,
    InvalidActionError,
    InvalidSettingError,
    JsonValue,
    Observation,
    StepResult,
    read_float,
    read_int,
)

# At most nine digits: longer ones are no guess, and int() refuses very long ones.
_NUMBER = re.compile(r"(?<![0-9.])-?[0-9]{1,9}(?![0-9]|\.[0-9])")


def parse_guess(text: str) -> int | None:
    """Return the last whole number of a text, or None."""
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) if numbers else None


class GuessingEnvironment(Environment):
    """Guess a secret number; each turn answers higher or lower."""

    description = "Guess a secret number within a few turns; the answers are higher or lower."
    default_config: ClassVar[Mapping[str, JsonValue]] = {
        "low": 1,
        "high": 100,
        "max_turns": 8,
        "shaping": 0.0,
    }

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        """Draw the number and explain the game."""
        low = read_int(config, "low", minimum=-(10**9) + 1, maximum=10**9 - 1)
        high = read_int(config, "high", minimum=-(10**9) + 1, maximum=10**9 - 1)
        if high <= low:
            raise InvalidSettingError("high", f"must be above low ({low}), got {high}")
        self._max_turns = read_int(config, "max_turns", minimum=1, maximum=10_000)
        self._shaping = read_float(config, "shaping", minimum=0.0, maximum=1.0)
        self._num_numbers = high - low + 1
        self._low, self._high = low, high
        self._secret = random.Random(seed).randint(low, high)
        self._num_turns = 0
        return Observation.of_user(
            f"I think of a whole number from {low} to {high}. Find it within {self._max_turns} "
            "guesses. Reply with one number; I answer higher or lower."
        )

    def step(self, action: Action) -> StepResult:
        """Compare a guess with the number; an unreadable one costs a turn."""
        if action.text is None:
            raise InvalidActionError("guesses are texts")
        self._num_turns += 1
        guess = parse_guess(action.text)
        info: dict[str, JsonValue] = {"num_turns": self._num_turns, "guess": guess}
        if guess == self._secret:
            return StepResult(Observation(), 1.0, True, {**info, "correct": True})
        reward = 0.0
        if guess is None:
            info["parse_error"] = "the reply holds no whole number"
            answer = "That is no guess. Reply with one whole number."
        else:
            reward = self._shaping * self._rule_out(guess) / self._num_numbers
            answer = "higher" if guess < self._secret else "lower"
        if self._num_turns >= self._max_turns:
            return StepResult(Observation(), reward, True, {**info, "correct": False})
        return StepResult(Observation.of_user(answer), reward, False, {**info, "correct": False})

    def _rule_out(self, guess: int) -> int:
        """Narrow the numbers that are left; return how many a wrong guess ruled out."""
        before = self._high - self._low
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        return before - (self._high - self._low)
