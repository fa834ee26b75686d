"""Time spans as people write them: `90s`, `15m`, `12h`, `7d`."""

from __future__ import annotations

import re

import typer

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def parse_duration(text: str) -> float:
    """Return a time span in seconds.

    Raises:
        typer.BadParameter: If it is not a number with a unit.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time; write it as 90s, 15m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]
