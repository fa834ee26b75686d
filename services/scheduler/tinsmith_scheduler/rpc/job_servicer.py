"""JobService: one method for each call, which decodes, checks the tenant, calls, encodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from tinsmith.names import JobName, KeyName, ProjectName
from tinsmith.v1 import job_pb2, job_pb2_grpc
from tinsmith_runtime.errors import JobsDisabledError, NotFoundError
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.pages import take_page
from tinsmith_runtime.rpc.requests import decode_identity, parse_name
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.auth.api_keys import Keys
from tinsmith_scheduler.jobs.launcher import Launcher
from tinsmith_scheduler.rpc import codec, job_codec
from tinsmith_scheduler.runs.reported_metrics import REPORTED_METRICS
from tinsmith_scheduler.store.database import answer_once, recall
from tinsmith_scheduler.store.job_reports import JobReports, job_not_found

Context = grpc.aio.ServicerContext[Any, Any]


class JobServicer(job_pb2_grpc.JobServiceServicer):
    """Maps JobService onto the domain.

    Args:
        launcher: Runs jobs; None where jobs are disabled.
        reports: What drivers report.
        keys: Has the keys of jobs too.
        database: Where answers are kept.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        launcher: Launcher | None,
        reports: JobReports,
        keys: Keys,
        database: Database,
        *,
        wall_clock: Callable[[], float],
    ) -> None:
        self._found_launcher = launcher
        self._reports = reports
        self._keys = keys
        self._database = database
        self._wall_clock = wall_clock

    @property
    def _launcher(self) -> Launcher:
        if self._found_launcher is None:
            raise JobsDisabledError(
                "this deployment runs no jobs; its operator sets job_launcher of the scheduler to "
                "local or kubernetes"
            )
        return self._found_launcher

    async def CreateTrainingJob(
        self, request: job_pb2.CreateTrainingJobRequest, context: Context
    ) -> job_pb2.TrainingJob:
        project = _own_project(request.parent)
        caller = current_caller()
        if not caller.is_pod and self._keys.of_caller(caller).job:
            # A driver would otherwise run what its job was not given, with keys of its own.
            raise caller.denied("CreateTrainingJob as the driver of a job")
        identity = decode_identity(request, project)
        name = JobName(project, job_codec.decode_job_id(request.training_job_id))
        spec, labels = job_codec.decode_new_job(request)
        known = await self._database.read(lambda connection: recall(connection, identity))
        if known is None:
            # A launcher answers a repeat alike: an end between it and the commit costs nothing.
            job = await self._launcher.create(name, spec, labels, identity)
            encoded = job_codec.encode_job(job).SerializeToString()
            known = await answer_once(
                self._database, identity, lambda _: encoded, now_s=self._wall_clock()
            )
        return job_pb2.TrainingJob.FromString(known)

    async def GetTrainingJob(
        self, request: job_pb2.GetTrainingJobRequest, context: Context
    ) -> job_pb2.TrainingJob:
        return job_codec.encode_job(await self._launcher.get(_own_job(request.name)))

    async def ListTrainingJobs(
        self, request: job_pb2.ListTrainingJobsRequest, context: Context
    ) -> job_pb2.ListTrainingJobsResponse:
        page = codec.decode_page(request.page_size, request.page_token)
        jobs, token = await self._launcher.list(_own_project(request.parent), page)
        return job_pb2.ListTrainingJobsResponse(
            training_jobs=[job_codec.encode_job(job) for job in jobs], next_page_token=token
        )

    async def CancelTrainingJob(
        self, request: job_pb2.CancelTrainingJobRequest, context: Context
    ) -> job_pb2.TrainingJob:
        return job_codec.encode_job(await self._launcher.cancel(_own_job(request.name)))

    async def SuspendTrainingJob(
        self, request: job_pb2.SuspendTrainingJobRequest, context: Context
    ) -> job_pb2.TrainingJob:
        name = _own_job(request.name)
        return job_codec.encode_job(await self._launcher.set_suspended(name, suspended=True))

    async def ResumeTrainingJob(
        self, request: job_pb2.ResumeTrainingJobRequest, context: Context
    ) -> job_pb2.TrainingJob:
        name = _own_job(request.name)
        return job_codec.encode_job(await self._launcher.set_suspended(name, suspended=False))

    async def RetryTrainingJob(
        self, request: job_pb2.RetryTrainingJobRequest, context: Context
    ) -> job_pb2.TrainingJob:
        return job_codec.encode_job(await self._launcher.retry(_own_job(request.name)))

    async def DeleteTrainingJob(
        self, request: job_pb2.DeleteTrainingJobRequest, context: Context
    ) -> job_pb2.DeleteTrainingJobResponse:
        await self._launcher.delete(_own_job(request.name))
        return job_pb2.DeleteTrainingJobResponse()

    async def WatchTrainingJob(
        self, request: job_pb2.WatchTrainingJobRequest, context: Context
    ) -> AsyncIterator[job_pb2.TrainingJob]:
        async for job in self._launcher.watch(_own_job(request.name), request.revision):
            yield job_codec.encode_job(job)

    async def ReadTrainingJobLog(
        self, request: job_pb2.ReadTrainingJobLogRequest, context: Context
    ) -> AsyncIterator[job_pb2.ReadTrainingJobLogResponse]:
        wanted = job_codec.decode_log_request(request)
        async for part in self._launcher.read_log(_own_job(request.name), wanted):
            yield job_codec.encode_log_part(part)

    async def ReportTrainingJob(
        self, request: job_pb2.ReportTrainingJobRequest, context: Context
    ) -> job_pb2.TrainingJobReport:
        report = await self._reports.report(
            current_caller(),
            _own_job(request.name),
            job_codec.decode_uid(request.uid),
            job_codec.decode_update(request),
        )
        if report.run:
            REPORTED_METRICS.note(report.run, report.metrics)
        return job_codec.encode_report(report)

    async def GetTrainingJobReport(
        self, request: job_pb2.GetTrainingJobReportRequest, context: Context
    ) -> job_pb2.TrainingJobReport:
        name = _own_job(request.name)
        report = await self._reports.get(name, request.uid)
        return job_codec.encode_report(report, with_state=True)

    async def ListTrainingJobReports(
        self, request: job_pb2.ListTrainingJobReportsRequest, context: Context
    ) -> job_pb2.ListTrainingJobReportsResponse:
        reports, token = take_page(
            "trainingJobReports",
            await self._reports.list(job_codec.decode_identities(request)),
            lambda report: f"{report.job}@{report.uid}",
            request,
        )
        return job_pb2.ListTrainingJobReportsResponse(
            reports=[job_codec.encode_report(report) for report in reports], next_page_token=token
        )

    async def DeleteTrainingJobReport(
        self, request: job_pb2.DeleteTrainingJobReportRequest, context: Context
    ) -> job_pb2.DeleteTrainingJobReportResponse:
        name = parse_name(JobName, request.name, "name")
        await self._reports.delete(name, job_codec.decode_uid(request.uid))
        return job_pb2.DeleteTrainingJobReportResponse()

    async def EnsureJobKey(
        self, request: job_pb2.EnsureJobKeyRequest, context: Context
    ) -> job_pb2.JobKey:
        new = job_codec.decode_new_key(request)
        return job_codec.encode_job_key(await self._keys.ensure_job_key(new, current_caller()))

    async def RevokeJobKey(
        self, request: job_pb2.RevokeJobKeyRequest, context: Context
    ) -> job_pb2.JobKey:
        name = parse_name(KeyName, request.name, "name")
        return job_codec.encode_job_key(await self._keys.revoke_job_key(name, current_caller()))

    async def ListJobKeys(
        self, request: job_pb2.ListJobKeysRequest, context: Context
    ) -> job_pb2.ListJobKeysResponse:
        page = codec.decode_page(request.page_size, request.page_token)
        keys, token = self._keys.list_job_keys(page, request.job)
        return job_pb2.ListJobKeysResponse(
            keys=[job_codec.encode_job_key(key) for key in keys], next_page_token=token
        )


def _own_project(parent: str) -> str:
    project = parse_name(ProjectName, parent, "parent").project
    current_caller().require_project(
        project, lambda: NotFoundError(f"project {project} does not exist", project=project)
    )
    return project


def _own_job(value: str) -> JobName:
    name = parse_name(JobName, value, "name")
    current_caller().require_project(name.project, lambda: job_not_found(name))
    return name
