"""An alert: when it fires, what it says, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass

TEAM_RUN = "run"
"""Alerts for the owner of a run: its loop is ill, the service is well."""
TEAM_SERVICE = "service"
"""Alerts for operators."""
_LABELS = re.compile(r"\{[^}]*\}")
_LIMIT = re.compile(r"[^<>=]+ (?P<side>[<>]) (?P<value>\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Limit:
    """Where an alert begins to fire.

    Attributes:
        value: In the unit of what the alert measures.
        is_least: Whether values below it are bad; else those above.
    """

    value: float
    is_least: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One rule.

    Attributes:
        name: As Alertmanager shows it.
        expression: Fires for each series that it returns.
        lasts: How long it must hold.
        severity: `critical` wants a person now, `warning` today, `info` is to be known.
        team: Its readers: the owners of the `run`, or those of the `service`.
        says: One sentence with the labels of the series.
        means: What is wrong, for the runbook.
        remedy: What to do, for the runbook.
    """

    name: str
    expression: str
    lasts: str
    severity: str
    team: str
    says: str
    means: str
    remedy: str

    @property
    def limit(self) -> Limit:
        """The number that a plot of what it measures shows as a line.

        Raises:
            ValueError: If it compares with something else than one number.
        """
        found = _LIMIT.fullmatch(_LABELS.sub("", self.expression))
        if found is None:
            raise ValueError(f"{self.name} has no limit that is one number: {self.expression}")
        return Limit(float(found["value"]), found["side"] == "<")
