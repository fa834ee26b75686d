"""Penalties and biases that a request may ask for, by OpenAI's and Hugging Face's rules.

The sampler's engine does to logits what they say; here they are checked, at every edge that takes
them. The bounds keep shaped logits finite, and the tokens of one request few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith_runtime.errors import InvalidFieldError, NotFiniteInputError

MAX_LOGIT_BIASES = 1024
"""Tokens that one request may bias."""
MAX_LOGIT_BIAS = 100.0
"""Furthest from 0 that a bias may be."""
MAX_PENALTY = 2.0
"""Furthest from 0 that a frequency or presence penalty may be."""
MAX_REPETITION_PENALTY = 100.0
"""Largest factor; its inverse is the least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    """What is done to the logits of a request's samples, by OpenAI's and Hugging Face's rules.

    The repetition penalty divides positive logits, and multiplies others, of tokens that prompt or
    completion hold. Then each token of the completion loses the frequency penalty as often as it
    is there, and the presence penalty once. Biases are added as they are.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_neutral(self) -> bool:
        """Whether it changes nothing."""
        return (
            self.repetition_penalty == 1.0
            and self.frequency_penalty == 0.0
            and self.presence_penalty == 0.0
            and not self.logit_bias
        )

    def check(self, params: str) -> None:
        """Raise the error that names the first field out of range.

        Args:
            params: What stands before the names of fields.

        Raises:
            NotFiniteInputError: A number is NaN or infinite.
            InvalidFieldError: A number is out of range, or too many tokens are biased.
        """
        bounds = {
            "repetition_penalty": (1.0 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
            "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
            "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
        }
        for name, (least, most) in bounds.items():
            _check_number(getattr(self, name), least, most, f"{params}{name}")
        place = f"{params}logit_bias"
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidFieldError(place, f"must bias at most {MAX_LOGIT_BIASES} tokens")
        for bias in self.logit_bias.values():
            _check_number(bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, place)


NEUTRAL = Shaping()
"""Changes nothing."""


def _check_number(value: float, least: float, most: float, place: str) -> None:
    if not math.isfinite(value):
        raise NotFiniteInputError(place, f"must be finite, got {value}")
    if not least <= value <= most:
        raise InvalidFieldError(place, f"must be {least:g} to {most:g}, got {value:g}")
