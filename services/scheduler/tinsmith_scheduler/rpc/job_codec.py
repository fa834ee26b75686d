"""Protobuf to domain values and back, for jobs: their keys and reports."""

from __future__ import annotations

import hashlib
import math
import re

from tinsmith.jobs.json_form import JobFormatError, parse_spec, parse_status, to_json
from tinsmith.names import CheckpointName, JobName, KeyName, RunName, is_valid_id
from tinsmith.v1 import job_pb2
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.rpc.requests import check_text, decode_labels, encode_time, parse_name
from tinsmith_scheduler.rpc.codec import decode_key_role
from tinsmith_scheduler.store.records import (
    Job,
    JobOutcome,
    JobReport,
    JobUpdate,
    Json,
    Key,
    KeyState,
    LogPart,
    LogPosition,
    NewJobKey,
)

MAX_STATE_BYTES = 256 * 1024
_MAX_SPEC_BYTES = 512 * 1024
_MAX_PROBLEM = 500
_MAX_METRICS = 64
_MAX_REPORTS = 1000
_MAX_POOL = 256
_JOB_ID = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")

_OUTCOMES = {
    job_pb2.TrainingJobReport.OUTCOME_UNSPECIFIED: JobOutcome.NONE,
    job_pb2.TrainingJobReport.OUTCOME_SAVED: JobOutcome.SAVED,
    job_pb2.TrainingJobReport.OUTCOME_SUCCEEDED: JobOutcome.SUCCEEDED,
    job_pb2.TrainingJobReport.OUTCOME_FAILED: JobOutcome.FAILED,
}
_OUTCOME_NUMBERS = {outcome: number for number, outcome in _OUTCOMES.items()}


def decode_job_id(value: str) -> str:
    """Return the last part of the name of a new job, which begins the names of its pods."""
    if _JOB_ID.fullmatch(value) is None:
        raise InvalidFieldError(
            "training_job_id",
            "must be 1 to 40 of lower-case letters, digits and '-', begin with a letter and end "
            "with a letter or digit",
        )
    return value


def decode_new_job(request: job_pb2.CreateTrainingJobRequest) -> tuple[Json, dict[str, str]]:
    """Return the spec of a new job as JSON, and its labels."""
    if not request.training_job.HasField("spec"):
        raise InvalidFieldError("training_job.spec", "is required")
    size = request.training_job.spec.ByteSize()
    if size > _MAX_SPEC_BYTES:
        raise InvalidFieldError("training_job.spec", f"must be at most {_MAX_SPEC_BYTES} bytes")
    try:
        spec = to_json(request.training_job.spec)
        # Both ways: later readers of the job get it from its JSON.
        parse_spec(spec)
    except JobFormatError as error:
        raise InvalidFieldError("training_job.spec", str(error)[:_MAX_PROBLEM]) from error
    return spec, decode_labels(request.training_job.labels)


def encode_job(job: Job) -> job_pb2.TrainingJob:
    """Return the message of a job."""
    return job_pb2.TrainingJob(
        name=job.name,
        uid=job.uid,
        spec=parse_spec(job.spec, lenient=True),
        status=parse_status(job.status),
        create_time=encode_time(job.create_time_s),
        labels=job.labels,
        revision=job.revision,
    )


def decode_log_request(request: job_pb2.ReadTrainingJobLogRequest) -> LogPosition:
    """Return which log is asked for."""
    for field in ("index", "tail_lines"):
        if getattr(request, field) < 0:
            raise InvalidFieldError(field, "must not be negative")
    return LogPosition(
        role=check_text(request.role, "role") or "driver",
        index=request.index,
        follow=request.follow,
        tail_lines=request.tail_lines,
        position=check_text(request.position, "position"),
    )


def encode_log_part(part: LogPart) -> job_pb2.ReadTrainingJobLogResponse:
    """Return the message of a part of a log."""
    return job_pb2.ReadTrainingJobLogResponse(text=part.text, position=part.position)


def decode_uid(value: str, field: str = "uid") -> str:
    """Return what tells a job from others of its name."""
    if not is_valid_id(value):
        raise InvalidFieldError(field, "is required: the uid of the job")
    return value


def decode_update(request: job_pb2.ReportTrainingJobRequest) -> JobUpdate:
    """Return what a driver reports."""
    for field in ("step", "max_steps"):
        if getattr(request, field) < 0:
            raise InvalidFieldError(field, "must not be negative")
    if len(request.metrics) > _MAX_METRICS:
        raise InvalidFieldError("metrics", f"must be at most {_MAX_METRICS}")
    if len(request.state) > MAX_STATE_BYTES:
        raise InvalidFieldError("state", f"must be at most {MAX_STATE_BYTES} bytes")
    outcome = _OUTCOMES.get(request.outcome)
    if outcome is None:
        raise InvalidFieldError("outcome", "is not an outcome that this release knows")
    if request.run:
        parse_name(RunName, request.run, "run")
    checkpoint = None
    if request.HasField("checkpoint"):
        saved = parse_name(CheckpointName, request.checkpoint.name, "checkpoint.name")
        checkpoint = (str(saved), request.checkpoint.step)
    return JobUpdate(
        step=request.step if request.HasField("step") else None,
        max_steps=request.max_steps if request.HasField("max_steps") else None,
        # JSON has no word for what is not finite, and neither has the status of the job.
        metrics={
            check_text(name, "metrics"): value
            for name, value in request.metrics.items()
            if math.isfinite(value)
        },
        run=request.run if request.HasField("run") else None,
        checkpoint=checkpoint,
        state=request.state if request.HasField("state") else None,
        message=check_text(request.message, "message") if request.HasField("message") else None,
        outcome=outcome,
        replay_diverged=request.replay_diverged,
    )


def encode_report(report: JobReport, *, with_state: bool = False) -> job_pb2.TrainingJobReport:
    """Return the message of a report; the driver's state is for those who ask for it."""
    message = job_pb2.TrainingJobReport(
        name=report.job,
        uid=report.uid,
        step=report.step,
        max_steps=report.max_steps,
        metrics=report.metrics,
        run=report.run,
        state=report.state if with_state else b"",
        message=report.message,
        outcome=_OUTCOME_NUMBERS[report.outcome],
        replay_diverged=report.replay_diverged,
    )
    if report.checkpoint:
        message.checkpoint.name = report.checkpoint
        message.checkpoint.step = report.checkpoint_step
    if report.update_time_s is not None:
        message.update_time.CopyFrom(encode_time(report.update_time_s))
    if report.step_time_s is not None:
        message.step_time.CopyFrom(encode_time(report.step_time_s))
    return message


def decode_identities(
    request: job_pb2.ListTrainingJobReportsRequest,
) -> list[tuple[str, str]]:
    """Return the names and uids of the jobs that are asked about."""
    if len(request.jobs) > _MAX_REPORTS:
        raise InvalidFieldError("jobs", f"must be at most {_MAX_REPORTS}")
    return [
        (str(parse_name(JobName, job.name, "jobs.name")), decode_uid(job.uid, "jobs.uid"))
        for job in request.jobs
    ]


def decode_new_key(request: job_pb2.EnsureJobKeyRequest) -> NewJobKey:
    """Return the key that a job is to have."""
    if len(request.secret_sha256) != hashlib.sha256().digest_size:
        raise InvalidFieldError("secret_sha256", "must be 32 bytes")
    if re.fullmatch("[a-z0-9]{12}", request.key_id) is None:
        raise InvalidFieldError("key_id", "must be 12 lower-case letters and digits")
    if len(request.pool) > _MAX_POOL:
        raise InvalidFieldError("pool", f"must have at most {_MAX_POOL} characters")
    return NewJobKey(
        job=parse_name(JobName, request.job, "job"),
        uid=decode_uid(request.uid),
        key_id=request.key_id,
        secret_sha256=request.secret_sha256,
        pool=check_text(request.pool, "pool"),
        display_name=check_text(request.display_name, "display_name"),
        role=decode_key_role(request.role),
    )


def encode_job_key(key: Key) -> job_pb2.JobKey:
    """Return the message of the key of a job."""
    return job_pb2.JobKey(
        name=str(KeyName(key.project, key.key_id)),
        job=key.job,
        uid=key.job_uid,
        pool=key.pool,
        revoked=key.state is KeyState.REVOKED,
        create_time=encode_time(key.create_time_s),
    )
