"""Metrics by run, bounded in the number of runs.

A series for each run that ever was would fill a Prometheus. A pod therefore keeps the series of the
runs that were active last, `MAX_RUNS` of them. A further run takes the place of the one that was
idle longest, whose series end; a run that comes back begins new ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeVar

from prometheus_client.metrics import MetricWrapperBase

from tinsmith.names import RunName

MAX_RUNS = 100
"""Runs that a pod has series of."""
RUN_LABELS = ("project", "run")
"""The first labels of each metric by run."""


_Key = tuple[int, tuple[str, ...]]
FamilyT = TypeVar("FamilyT", bound=MetricWrapperBase)


class RunSeries:
    """The series of the runs that were active last.

    Several threads may use one object. A caller keeps no series: it may end at any time.
    """

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self._max_runs = max_runs
        self._lock = threading.Lock()
        self._series: OrderedDict[str, dict[_Key, MetricWrapperBase]] = OrderedDict()
        self._labels: dict[str, tuple[str, str]] = {}

    def labels(self, family: FamilyT, run: str, *others: str) -> FamilyT:
        """Return the series of a run, as `family.labels` does.

        Args:
            family: A metric whose first labels are `RUN_LABELS`.
            run: Resource name of the run, which is active now.
            *others: Values of further labels.
        """
        with self._lock:
            if run not in self._series:
                self._admit(run)
            self._series.move_to_end(run)
            values = (*self._labels[run], *others)
            self._series[run][id(family), values] = family
            return family.labels(*values)

    def forget(self, run: str) -> None:
        """End the series of a run, as when it was deleted."""
        with self._lock:
            self._remove(run)

    def _admit(self, run: str) -> None:
        while len(self._series) >= self._max_runs:
            self._remove(next(iter(self._series)))
        self._series[run] = {}
        name = RunName.parse(run)
        self._labels[run] = (name.project, name.run)

    def _remove(self, run: str) -> None:
        for (_, values), family in self._series.pop(run, {}).items():
            family.remove(*values)
        self._labels.pop(run, None)
