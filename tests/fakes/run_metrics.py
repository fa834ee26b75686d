"""A service of metrics that has one reward of one run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from tinsmith.v1 import run_metrics_pb2, run_metrics_pb2_grpc

RUN = "projects/default/trainingRuns/run-1"


class _RunMetrics(run_metrics_pb2_grpc.RunMetricsServiceServicer):
    def __init__(self, count: Callable[[Any, str, Any], Awaitable[Any]]) -> None:
        self._count = count

    async def ListRunMetrics(self, request: Any, context: Any) -> Any:
        await self._count(context, "ListRunMetrics", request)
        reward = run_metrics_pb2.RunMetric(run=RUN, name="reward", last_step=7, last_value=0.5)
        return run_metrics_pb2.ListRunMetricsResponse(metrics=[reward])


def add_run_metrics(
    server: grpc.aio.Server, count: Callable[[Any, str, Any], Awaitable[Any]]
) -> None:
    """Serve them, and count each call before it is answered."""
    run_metrics_pb2_grpc.add_RunMetricsServiceServicer_to_server(
        _RunMetrics(count),  # type: ignore[abstract]
        server,
    )
