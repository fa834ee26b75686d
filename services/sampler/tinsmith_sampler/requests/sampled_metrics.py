"""What is sampled from the weights of runs, as metrics by run.

Noted when a request ends, from what it brings back anyway. Staleness is how many optimizer steps
the oldest token of a sequence lies behind the newest version of the run that this pod knows of.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from tinsmith.names import CheckpointName
from tinsmith_engine import SampledSequence
from tinsmith_runtime.observability.run_series import MAX_RUNS, RunSeries
from tinsmith_sampler.metrics import (
    RUN_SAMPLED_SEQUENCES,
    RUN_SAMPLED_TOKENS,
    RUN_STALENESS,
    STALENESS,
)
from tinsmith_sampler.requests.sessions import Target


def run_of(target: Target) -> str:
    """Return the run whose weights are sampled by its own project; empty for a base model.

    A checkpoint that another project published counts for no run.
    """
    if target.run:
        return target.run
    if target.checkpoint.startswith(f"projects/{target.project}/"):
        return str(CheckpointName.parse(target.checkpoint).run_name)
    return ""


class RunSampling:
    """Notes what was sampled from runs.

    Args:
        series: The series of the runs that were active last.
    """

    def __init__(self, series: RunSeries) -> None:
        self._series = series
        self._lock = threading.Lock()
        self._newest: OrderedDict[str, int] = OrderedDict()

    def note_version(self, target: Target, version: int) -> None:
        """Note a version that a live run has."""
        if not target.run:
            return
        with self._lock:
            self._newest[target.run] = max(version, self._newest.get(target.run, 0))
            self._newest.move_to_end(target.run)
            while len(self._newest) > MAX_RUNS:
                self._newest.popitem(last=False)

    def note_end(self, target: Target, sequences: Sequence[SampledSequence]) -> None:
        """Note the sequences of a request that ended."""
        run = run_of(target)
        if not run:
            return
        newest = self._newest.get(run)
        for sequence in sequences:
            self._series.labels(RUN_SAMPLED_TOKENS, run).inc(len(sequence.tokens))
            reason = sequence.finish_reason or "unfinished"
            self._series.labels(RUN_SAMPLED_SEQUENCES, run, reason).inc()
            if target.run and newest is not None and sequence.versions:
                staleness = max(0, newest - min(sequence.versions))
                STALENESS.observe(staleness)
                self._series.labels(RUN_STALENESS, run).set(staleness)


RUN_SAMPLING = RunSampling(RunSeries())
"""That of the process, as its metrics are."""
