"""Sends what optimizer steps measured to the scheduler, which keeps the metrics of runs.

It happens in the background: a scheduler that is away costs measurements in the end, no training.
"""

from __future__ import annotations

import logging
import time
from itertools import groupby

from tinsmith.v1 import run_metrics_pb2
from tinsmith_runtime.errors import ErrorCode, TinsmithError
from tinsmith_runtime.rpc.repeated_report import RepeatedReport
from tinsmith_runtime.rpc.requests import encode_time
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient
from tinsmith_trainer.cycle.step_metrics import StepMeasurement, StepMetrics

logger = logging.getLogger(__name__)

_STEPS_AT_ONCE = 200
_PREFIX = "trainer/"
_PASSING = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED})


class MetricsRecorder:
    """Records what waits, about once a second."""

    def __init__(self, steps: StepMetrics, scheduler: SchedulerClient) -> None:
        self._steps = steps
        self._scheduler = scheduler
        self._repeated = RepeatedReport("metrics of steps", self._record)

    def start(self) -> None:
        """Begin to record."""
        self._repeated.start()

    async def stop(self) -> None:
        """Record what is left, if that goes soon, and end."""
        await self._repeated.stop()

    async def _record(self) -> None:
        """Record until nothing waits, or the scheduler is away."""
        while taken := self._steps.take(_STEPS_AT_ONCE):
            taken.sort(key=lambda each: each.run)
            by_run = [(run, list(found)) for run, found in groupby(taken, lambda each: each.run)]
            for index, (run, found) in enumerate(by_run):
                if not await self._send(run, found):
                    self._steps.put_back([each for _, rest in by_run[index:] for each in rest])
                    return

    async def _send(self, run: str, found: list[StepMeasurement]) -> bool:
        """Send the steps of a run; return whether they need not be sent again."""
        request = run_metrics_pb2.RecordRunMetricsRequest(run=run)
        now = encode_time(time.time())
        for each in found:
            metrics = {f"{_PREFIX}{name}": value for name, value in each.metrics.items()}
            request.records.add(
                step=each.step,
                metrics=metrics,
                record_time=now,
                sequence_number=each.sequence_number,
            )
        try:
            await self._scheduler.record_run_metrics(request)
        except TinsmithError as error:
            if error.code in _PASSING:
                return False
            # Such as a run that is deleted, or a project that has no more room for metrics.
            logger.info("metrics of steps refused", extra={"run": run, "problem": error.message})
        return True
