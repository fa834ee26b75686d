"""What ends a completion, as sampling parameters say it."""

from __future__ import annotations

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
