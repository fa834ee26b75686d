"""The health of training by run, as metrics: what the operations of a run found.

It is noted when an operation has ended, on the event loop, from results that exist anyway. Nothing
is computed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.observability.run_series import RunSeries
from tinsmith_trainer import metrics as families

_GAUGES: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "entropy:mean": (families.RUN_ENTROPY, ()),
    "kl_v1:mean": (families.RUN_KL, ("v1",)),
    "kl_v2:mean": (families.RUN_KL, ("v2",)),
    "ratio:mean": (families.RUN_RATIO, ("mean",)),
    "ratio:max": (families.RUN_RATIO, ("max",)),
    "ratio_tail_fraction:mean": (families.RUN_RATIO_TAIL, ()),
    "clip_high_fraction:mean": (families.RUN_CLIP_FRACTION, ("high",)),
    "clip_low_fraction:mean": (families.RUN_CLIP_FRACTION, ("low",)),
    "mismatch:max": (families.RUN_MISMATCH, ()),
    "zero_advantage_fraction:mean": (families.RUN_ZERO_ADVANTAGE, ()),
}
"""Metrics of a batch, by the gauge that shows each and its further labels."""


class RunHealth:
    """Notes what the operations of runs found.

    Args:
        series: The series of the runs that were active last.
    """

    def __init__(self, series: RunSeries) -> None:
        self._series = series

    def note_batch(
        self, run: str, found: Mapping[str, float], *, num_tokens: int, num_sequences: int
    ) -> None:
        """Note a forward_backward that succeeded.

        Args:
            run: Resource name.
            found: Metrics of its loss.
            num_tokens: Of the batch.
            num_sequences: Of the batch.
        """
        labels = self._series.labels
        labels(families.RUN_TRAINED_TOKENS, run).inc(num_tokens)
        num_trained = found.get("num_loss_tokens:sum", 0.0)
        labels(families.RUN_TRAINED_SEQUENCE_TOKENS, run).set(num_trained / max(1, num_sequences))
        if num_trained:
            labels(families.RUN_LOSS, run).set(found["loss:sum"] / num_trained)
        for name, (family, others) in _GAUGES.items():
            if name in found:
                labels(family, run, *others).set(found[name])

    def note_step(self, run: str, found: Mapping[str, float], *, version: int) -> None:
        """Note an optimizer step that succeeded, and the version that it made."""
        labels = self._series.labels
        labels(families.RUN_STEPS, run).inc()
        labels(families.RUN_VERSION, run).set(version)
        labels(families.RUN_GRADIENT_NORM, run).set(found["grad_norm"])
        labels(families.RUN_LEARNING_RATE, run).set(found["learning_rate"])

    def note_wait(self, run: str, wait_s: float) -> None:
        """Note how long an operation waited for the cycle that begins with it now."""
        self._series.labels(families.RUN_QUEUE_WAIT_SECONDS, run).inc(wait_s)

    def note_end(self, run: str, error: TinsmithError | None, *, engine_s: float = 0.0) -> None:
        """Note the end of any operation, and its time on the engine."""
        labels = self._series.labels
        labels(families.RUN_ENGINE_SECONDS, run).inc(engine_s)
        outcome = "succeeded" if error is None else "failed"
        labels(families.RUN_OPERATIONS, run, outcome).inc()
        if error is not None:
            labels(families.RUN_FAILED_OPERATIONS, run, error.reason).inc()

    def note_divergence(self, run: str) -> None:
        """Note that a replay gave other bits."""
        self._series.labels(families.RUN_REPLAY_DIVERGED, run).set(1)

    def forget(self, run: str) -> None:
        """End the series of a run that this trainer holds no more."""
        self._series.forget(run)


RUN_HEALTH = RunHealth(RunSeries())
"""That of the process, as its metrics are."""
