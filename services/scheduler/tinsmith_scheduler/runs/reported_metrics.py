"""What clients report of their runs, as metrics: reward, its spread, lengths of responses.

Servers see tokens, log-probabilities and advantages, but no reward. So a loop reports it, and the
last value of each name below is shown by run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import Gauge

from tinsmith_runtime.observability.run_series import RunSeries
from tinsmith_scheduler.metrics import (
    RUN_DEAD_GROUPS,
    RUN_RESPONSE_TOKENS,
    RUN_REWARD,
    RUN_REWARD_SPREAD,
    RUN_TRUNCATED,
)

SHOWN: Mapping[str, Gauge] = {
    "reward": RUN_REWARD,
    "reward_spread": RUN_REWARD_SPREAD,
    "response_tokens": RUN_RESPONSE_TOKENS,
    "truncated_fraction": RUN_TRUNCATED,
    "dead_group_fraction": RUN_DEAD_GROUPS,
    # The names of tinker-cookbook.
    "env/all/reward/total": RUN_REWARD,
    "env/all/ac_tokens_per_turn": RUN_RESPONSE_TOKENS,
}
"""Names that a client reports under, and the metric that shows each."""


class ReportedMetrics:
    """Shows what was reported last.

    Args:
        series: The series of the runs that were active last.
    """

    def __init__(self, series: RunSeries) -> None:
        self._series = series

    def note(self, run: str, metrics: Mapping[str, float]) -> None:
        """Show what a client reports of a run; names that are not shown are passed over."""
        for name, value in metrics.items():
            if name in SHOWN and math.isfinite(value):
                self._series.labels(SHOWN[name], run).set(value)


REPORTED_METRICS = ReportedMetrics(RunSeries())
"""That of the process, as its metrics are."""
