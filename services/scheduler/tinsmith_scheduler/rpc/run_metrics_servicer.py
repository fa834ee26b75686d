"""RunMetricsService: one method for each call, which decodes, checks the tenant, calls, encodes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import grpc.aio

from tinsmith.names import ProjectName, RunName
from tinsmith.v1 import run_metrics_pb2, run_metrics_pb2_grpc
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.rpc.auth import Caller, current_caller
from tinsmith_runtime.rpc.requests import decode_chosen_id, decode_time, encode_time, parse_name
from tinsmith_scheduler.rpc import codec
from tinsmith_scheduler.run_metrics.blocks import Curve
from tinsmith_scheduler.run_metrics.metric_store import CurveQuery, Metric
from tinsmith_scheduler.run_metrics.run_metrics import ALL_RUNS, RunMetrics, StepRecord
from tinsmith_scheduler.runs.reported_metrics import REPORTED_METRICS
from tinsmith_scheduler.runs.run_store import run_not_found

Context = grpc.aio.ServicerContext[Any, Any]

TRAINER_PREFIX = "trainer/"
MAX_POINTS_OF_REQUEST = 10_000
MAX_STEP = 2**48
_MAX_NAMES_ASKED = 64
_MAX_RUNS_ASKED = 1000
_MAX_POINTS_ASKED = 10_000
_DEFAULT_POINTS = 500
_ALL_RUNS_SUFFIX = f"/trainingRuns/{ALL_RUNS}"
_NAME = re.compile(r"[\x20-\x7e]{1,128}")


class RunMetricsServicer(run_metrics_pb2_grpc.RunMetricsServiceServicer):
    """Maps RunMetricsService onto the metrics of runs."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    async def RecordRunMetrics(
        self, request: run_metrics_pb2.RecordRunMetricsRequest, context: Context
    ) -> run_metrics_pb2.RecordRunMetricsResponse:
        """Record points of a run."""
        caller = current_caller()
        run = _own_run(request.run, "run")
        records = _decode_records(request, caller)
        revision = await self._metrics.record(run, records, is_limited=not caller.is_pod)
        for record in sorted(records, key=lambda each: each.step):
            REPORTED_METRICS.note(str(run), record.metrics)
        return run_metrics_pb2.RecordRunMetricsResponse(revision=revision)

    async def QueryRunMetrics(
        self, request: run_metrics_pb2.QueryRunMetricsRequest, context: Context
    ) -> run_metrics_pb2.QueryRunMetricsResponse:
        """Return curves of a run."""
        curves = await self._metrics.query(_own_run(request.run, "run"), _decode_query(request))
        return run_metrics_pb2.QueryRunMetricsResponse(
            curves=[_encode_curve(curve) for curve in curves.curves],
            bucket_steps=curves.bucket_steps,
            revision=curves.revision,
        )

    async def ListRunMetrics(
        self, request: run_metrics_pb2.ListRunMetricsRequest, context: Context
    ) -> run_metrics_pb2.ListRunMetricsResponse:
        """List the metrics of a run, or of all runs of a project."""
        run = _decode_parent(request.parent)
        names = _decode_names(request.names)
        page = codec.decode_page(request.page_size, request.page_token)
        among = _decode_run_ids(request.run_ids, run.project)
        metrics, token = await self._metrics.list(run, names, page, among=among)
        return run_metrics_pb2.ListRunMetricsResponse(
            metrics=[_encode_metric(metric) for metric in metrics], next_page_token=token
        )


def _own_run(value: str, field: str) -> RunName:
    name = parse_name(RunName, value, field)
    current_caller().require_project(name.project, lambda: run_not_found(name))
    return name


def _decode_parent(value: str) -> RunName:
    """Return the caller's run, or what stands for all runs of its project."""
    if not value.endswith(_ALL_RUNS_SUFFIX):
        return _own_run(value, "parent")
    parsed = parse_name(ProjectName, value.removesuffix(_ALL_RUNS_SUFFIX), "parent")
    name = RunName(parsed.project, ALL_RUNS)
    current_caller().require_project(name.project, lambda: run_not_found(name))
    return name


def _decode_records(
    request: run_metrics_pb2.RecordRunMetricsRequest, caller: Caller
) -> list[StepRecord]:
    num_points = sum(len(record.metrics) for record in request.records)
    if not 1 <= num_points <= MAX_POINTS_OF_REQUEST:
        raise InvalidFieldError(
            "records", f"must hold 1 to {MAX_POINTS_OF_REQUEST} values, got {num_points}"
        )
    records = []
    for index, record in enumerate(request.records):
        field = f"records[{index}]"
        if not 0 <= record.step <= MAX_STEP:
            raise InvalidFieldError(f"{field}.step", f"must be 0 to {MAX_STEP}")
        for name in record.metrics:
            _check_name(name, f"{field}.metrics")
            if name.startswith(TRAINER_PREFIX) and not caller.is_pod:
                raise InvalidFieldError(
                    f"{field}.metrics", f"names beginning with {TRAINER_PREFIX} are the trainer's"
                )
        if record.sequence_number and not caller.is_pod:
            raise InvalidFieldError(f"{field}.sequence_number", "is the trainer's to give")
        if record.sequence_number < 0:
            raise InvalidFieldError(f"{field}.sequence_number", "must not be negative")
        time_s = decode_time(record.record_time) if record.HasField("record_time") else None
        records.append(
            StepRecord(record.step, dict(record.metrics), time_s, record.sequence_number)
        )
    return records


def _check_name(name: str, field: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise InvalidFieldError(
            field, "must have names of 1 to 128 printable ASCII characters, such as env/reward"
        )
    return name


def _decode_names(names: Iterable[str]) -> frozenset[str]:
    found = frozenset(_check_name(name, "names") for name in names)
    if len(found) > _MAX_NAMES_ASKED:
        raise InvalidFieldError("names", f"must be at most {_MAX_NAMES_ASKED}")
    return found


def _decode_run_ids(run_ids: Iterable[str], project: str) -> frozenset[str]:
    """Return the names of runs that are given by their ids."""
    chosen = {decode_chosen_id(each, "run_ids", is_required=True) for each in run_ids}
    if len(chosen) > _MAX_RUNS_ASKED:
        raise InvalidFieldError("run_ids", f"must be at most {_MAX_RUNS_ASKED}")
    return frozenset(str(RunName(project, each)) for each in chosen)


def _decode_query(request: run_metrics_pb2.QueryRunMetricsRequest) -> CurveQuery:
    max_step = request.max_step if request.HasField("max_step") else None
    for field, step in (("min_step", request.min_step), ("max_step", max_step or 0)):
        if not 0 <= step <= MAX_STEP:
            raise InvalidFieldError(field, f"must be 0 to {MAX_STEP}")
    if not 0 <= request.max_points <= _MAX_POINTS_ASKED:
        raise InvalidFieldError("max_points", f"must be 1 to {_MAX_POINTS_ASKED}")
    width = request.bucket_steps
    if width < 0 or width > MAX_STEP or width & (width - 1):
        raise InvalidFieldError("bucket_steps", f"must be a power of two up to {MAX_STEP}")
    if request.after_revision < 0:
        raise InvalidFieldError("after_revision", "must not be negative")
    return CurveQuery(
        names=_decode_names(request.names),
        min_step=request.min_step,
        max_step=max_step,
        max_points=request.max_points or _DEFAULT_POINTS,
        bucket_steps=width,
        after_revision=request.after_revision,
    )


def _encode_curve(curve: Curve) -> run_metrics_pb2.MetricCurve:
    return run_metrics_pb2.MetricCurve(
        name=curve.name,
        steps=curve.steps.tolist(),
        means=curve.means.tolist(),
        minima=curve.minima.tolist(),
        maxima=curve.maxima.tolist(),
        times=curve.times_s.tolist(),
    )


def _encode_metric(metric: Metric) -> run_metrics_pb2.RunMetric:
    return run_metrics_pb2.RunMetric(
        run=metric.run,
        name=metric.name,
        num_points=metric.num_points,
        last_step=metric.last_step,
        last_value=metric.last_value,
        update_time=encode_time(metric.update_time_s),
    )
