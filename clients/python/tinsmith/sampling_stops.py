"""What ends a completion, as sampling parameters say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tinsmith.types import SamplingParams


def read_stops(params: SamplingParams) -> tuple[list[str | int], bool]:
    """Return the strings and token ids of one's own, and whether the model's end of turn counts."""
    stop = params.stop
    if stop is None:
        own: list[str | int] = []
    else:
        own = [stop] if isinstance(stop, str) else list(stop)
    if params.keeps_turn_end is not None:
        return own, params.keeps_turn_end
    return own, stop is None or (bool(own) and all(isinstance(each, str) for each in own))


def with_stop(params: SamplingParams, stop: Sequence[str | int]) -> SamplingParams:
    """Return parameters that also end a turn where its environment says so.

    Whether the model's end of turn ends it too is what the parameters alone say.
    """
    if not stop:
        return params
    own, has_turn_end = read_stops(params)
    return dataclasses.replace(params, stop=[*own, *stop], keeps_turn_end=has_turn_end)
