"""Says in the status of a job that its run lost bit identity: a replay gave other bits.

The job goes on, since its weights are as good as before. What is lost is the promise that they are
those of an undisturbed training, and that is not taken back: the condition stays true.
"""

from __future__ import annotations

import datetime

from tinsmith_jobs import conditions
from tinsmith_jobs.plan.actions import Event
from tinsmith_jobs.plan.observed import Report
from tinsmith_jobs.status import Status


def with_divergence(
    status: Status, report: Report | None, now: datetime.datetime
) -> tuple[Status, Event | None]:
    """Return a status that says whether a replay diverged, and an event the first time."""
    if report is None or not report.has_diverged:
        return status, None
    known = status.condition(conditions.REPLAY_DIVERGED)
    if known is not None and known.is_true:
        return status, None
    message = (
        f"a replay of {report.run} gave other bits than the first execution; the training goes on, "
        "and a repetition of it need not give the same weights"
    )
    return (
        status.with_condition(
            conditions.REPLAY_DIVERGED, True, conditions.OTHER_BITS, message, now
        ),
        Event(conditions.OTHER_BITS, message, is_warning=True),
    )
