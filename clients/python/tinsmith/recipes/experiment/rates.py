"""The learning rate of an experiment: the one that was asked for, else what is advised."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from tinsmith import hyperparams
from tinsmith.errors import ConfigurationError

ConfigT = TypeVar("ConfigT")

_FAR = 10.0
"""Times above or below the advice from which on it is told."""


@dataclass(frozen=True, slots=True)
class ChosenRate:
    """A learning rate.

    Attributes:
        value: Its peak.
        note: Where it comes from, or that it is far from the advice; empty if there is no more to
            say than that it was given.
    """

    value: float
    note: str


def choose_rate(
    given: float | None,
    base_model: str,
    adapter: str,
    *,
    default: float,
    advised: float | None = None,
) -> ChosenRate:
    """Return the rate that an experiment trains with.

    Args:
        given: What was asked for; None for advice.
        base_model: Name of the model.
        adapter: `lora` or `full`.
        default: For models of which nothing is known, such as made ones.
        advised: In the place of the supervised rate, for a recipe that needs another.
    """
    try:
        supervised = hyperparams.get_lr(base_model, is_lora=adapter != "full")
    except ConfigurationError:
        if given is not None:
            return ChosenRate(given, "")
        return ChosenRate(
            default,
            f"learning_rate={default:g}: none is advised for {base_model}; "
            f"learning_rate={default / 3:.1g},{default:.1g},{default * 3:.1g} tries several",
        )
    advised = supervised if advised is None else advised
    if given is None:
        return ChosenRate(advised, f"learning_rate={advised:.3g}, as advised for {base_model}")
    if advised / _FAR <= given <= advised * _FAR:
        return ChosenRate(given, "")
    return ChosenRate(
        given, f"warning: learning_rate={given:g} is far from {advised:.3g}, which is advised"
    )


def with_rate(config: ConfigT, learning_rate: float) -> ConfigT:
    """Return the settings of a recipe with the rate that it trains with."""
    return dataclasses.replace(config, learning_rate=learning_rate)  # type: ignore[type-var]
