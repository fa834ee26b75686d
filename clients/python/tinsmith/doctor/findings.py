"""What a check found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How bad a finding is."""

    GOOD = "good"
    NOTE = "note"
    """Works, and may not be what is wanted."""
    PROBLEM = "problem"
    """Something will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """Short name of the check, such as `disk`."""
    level: Level
    text: str
    remedy: str = ""
    """What to do, as a command where there is one."""


def good(check: str, text: str) -> Finding:
    """Return a finding of something that is as it should be."""
    return Finding(check, Level.GOOD, text)


def note(check: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that works and may not be wanted."""
    return Finding(check, Level.NOTE, text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that will fail."""
    return Finding(check, Level.PROBLEM, text, remedy)
