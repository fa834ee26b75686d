"""An alert: when it fires, what it says, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

TEAM_RUN = "run"
"""Alerts for the owner of a run: its loop is ill, the service is well."""
TEAM_SERVICE = "service"
"""Alerts for operators."""


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
