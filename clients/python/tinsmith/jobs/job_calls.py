"""Jobs of the project: submit, watch and stop them; `job_forms.py` has the forms for users."""

from __future__ import annotations

import asyncio
import datetime
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message

from tinsmith import names
from tinsmith.errors import ConfigurationError, OperationTimeoutError, TinsmithError
from tinsmith.jobs.data import find_data
from tinsmith.jobs.json_form import JobFormatError, parse_manifest, parse_spec, to_json
from tinsmith.kubectl_yaml import read_documents
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.rpc.lists import read_pages
from tinsmith.rpc.transport import Backoff, Connection
from tinsmith.settings import local_address
from tinsmith.v1 import job_pb2, trainer_pb2

FINISHED_PHASES = frozenset({"Succeeded", "Failed", "Cancelled"})

_STREAM_TIMEOUT_S = 3600.0
_STREAM_PAUSE_S = 0.2

MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job. `spec` and `status` are the JSON of the Kubernetes resource.

    Attributes:
        name: Resource name.
        uid: Tells it from another job that had the name before.
        phase: `Queued`, `Running`, `Succeeded`, `Failed` and so on; empty until it was
            looked at.
        waiting_for: One sentence that says why it does not move; empty if it does.
        spec: What is wanted.
        status: What is.
        labels: Labels.
        create_time: When it was submitted.
        revision: Tells one state of it from the next.
    """

    name: str
    uid: str
    phase: str
    waiting_for: str
    spec: dict[str, Any]
    status: dict[str, Any]
    labels: dict[str, str] = field(default_factory=dict)
    create_time: datetime.datetime | None = None
    revision: str = ""

    @property
    def job_id(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.phase in FINISHED_PHASES

    @property
    def failure(self) -> str:
        """Why it failed, or a pod of it last did, in one sentence; empty if nothing failed."""
        return str(self.status.get("failure", {}).get("message", ""))

    @property
    def checkpoint(self) -> str:
        """Resource name of the last save; empty before the first."""
        saved = self.status.get("checkpoint", {})
        return str((saved.get("final") or saved.get("latest") or {}).get("name", ""))


class JobCalls:
    """The jobs of a project. Names may be given by their last part.

    Example:
        >>> job = client.jobs.create(manifest="job.yaml")
        >>> print(client.jobs.wait(job.name).phase)
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    @call
    async def _create(
        self,
        job_id: str = "",
        spec: Mapping[str, Any] | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        manifest: str | Path | Mapping[str, Any] | None = None,
    ) -> JobInfo:
        """Submit a job.

        Args:
            job_id: Last part of its name.
            spec: What is wanted, as in the Kubernetes resource.
            labels: Labels.
            manifest: All of it at once: the path of a YAML file as `kubectl` takes it, or its
                content. `job_id` wins over its name.

        Returns:
            The job as the server took it.

        Raises:
            ConfigurationError: If the description is none, or names a file of data that is not on
                this machine, where the server runs.
            InvalidArgumentError: If the server refuses it.
            AlreadyExistsError: If the project has a job of this id.

        Example:
            >>> job = client.jobs.create(manifest="job.yaml")
        """
        try:
            if manifest is not None:
                name, job = parse_manifest(_read_manifest(manifest))
            else:
                name, job = job_id, job_pb2.TrainingJob(spec=parse_spec(spec or {}))
        except JobFormatError as error:
            raise ConfigurationError(
                f"the job is refused: {error}", remedy="correct the description"
            ) from error
        find_data(job.spec, self._core.settings.address, local_address())
        job.labels.update(labels or {})
        request = job_pb2.CreateTrainingJobRequest(
            parent=self._core.project,
            request_id=str(uuid.uuid4()),
            training_job_id=job_id or name,
            training_job=job,
        )
        return await self._answer(lambda c: c.job.CreateTrainingJob, request)

    @call
    async def _get(self, name: str) -> JobInfo:
        """Return a job.

        Returns:
            The job: phase, status and spec.

        Raises:
            NotFoundError: If the project has no job of this name.

        Example:
            >>> client.jobs.get("sft-1").phase
        """
        request = job_pb2.GetTrainingJobRequest(name=self._name(name))
        return await self._answer(lambda c: c.job.GetTrainingJob, request)

    @call
    async def _list(self) -> list[JobInfo]:
        """Return the jobs of the project.

        Returns:
            The jobs: phase, progress and status.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> names = [job.job_id for job in client.jobs.list()]
        """
        pages = read_pages(
            self._core.transport,
            self._core.scheduler,
            lambda c: c.job.ListTrainingJobs,
            job_pb2.ListTrainingJobsRequest(parent=self._core.project),
        )
        return [_decode_job(message) async for page in pages for message in page.training_jobs]

    @call
    async def _cancel(self, name: str) -> JobInfo:
        """Save and end a job for good.

        Returns:
            The job; it ends soon after.

        Raises:
            NotFoundError: If the project has no job of this name.

        Example:
            >>> client.jobs.cancel("sft-1")
        """
        request = job_pb2.CancelTrainingJobRequest(name=self._name(name))
        return await self._answer(lambda c: c.job.CancelTrainingJob, request)

    @call
    async def _suspend(self, name: str) -> JobInfo:
        """Save, give everything back that the job holds, and let it wait.

        Returns:
            The job; it is suspended soon after.

        Raises:
            NotFoundError: If the project has no job of this name.
            FailedPreconditionError: If it has ended (`JOB_FINISHED`).

        Example:
            >>> client.jobs.suspend("sft-1")
        """
        request = job_pb2.SuspendTrainingJobRequest(name=self._name(name))
        return await self._answer(lambda c: c.job.SuspendTrainingJob, request)

    @call
    async def _resume(self, name: str) -> JobInfo:
        """Let a suspended job go on from what it saved.

        Returns:
            The job; it goes on when there is room.

        Raises:
            NotFoundError: If the project has no job of this name.
            FailedPreconditionError: If it has ended (`JOB_FINISHED`).

        Example:
            >>> client.jobs.resume("sft-1")
        """
        request = job_pb2.ResumeTrainingJobRequest(name=self._name(name))
        return await self._answer(lambda c: c.job.ResumeTrainingJob, request)

    @call
    async def _retry(self, name: str) -> JobInfo:
        """Let a failed job go on from what it saved, by its present spec.

        Doing it to a job that has not ended changes nothing.

        Returns:
            The job; it goes on when there is room.

        Raises:
            NotFoundError: If the project has no job of this name.
            FailedPreconditionError: If it succeeded or was cancelled (`JOB_FINISHED`).

        Example:
            >>> client.jobs.retry("sft-1")
        """
        request = job_pb2.RetryTrainingJobRequest(name=self._name(name))
        return await self._answer(lambda c: c.job.RetryTrainingJob, request)

    @call
    async def _delete(self, name: str) -> None:
        """End a job and forget it; its runs and checkpoints stay.

        Raises:
            NotFoundError: If the project has no job of this name.

        Example:
            >>> client.jobs.delete("sft-1")
        """
        request = job_pb2.DeleteTrainingJobRequest(name=self._name(name))
        await self._call(lambda c: c.job.DeleteTrainingJob, request)

    def watch(self, name: str) -> Iterator[JobInfo]:
        """Yield a job now and whenever it changes, until it has ended or is gone.

        A server that is away is waited for, as calls are sent again.

        Yields:
            The job, once for each change.

        Raises:
            NotFoundError: If the project has no job of this name.

        Example:
            >>> for job in client.jobs.watch("sft-1"):
            ...     print(job.phase)
        """
        request = job_pb2.WatchTrainingJobRequest(name=self._name(name))

        def go_on(job: job_pb2.TrainingJob) -> None:
            request.revision = job.revision

        # Looked up first: of a job that is not there, a stream merely ends.
        self._core.background.call(self._get(name))
        is_finished = False
        while not is_finished:
            num_seen = 0
            for message in self._stream(lambda c: c.job.WatchTrainingJob, request, go_on):
                num_seen += 1
                job = _decode_job(message)
                is_finished = job.is_finished
                yield job
            if is_finished:
                return
            try:
                job = self._core.background.call(self._get(name))
            except TinsmithError as error:
                if error.reason == "JOB_NOT_FOUND":
                    return
                raise
            if not num_seen:
                time.sleep(_STREAM_PAUSE_S)
            if job.is_finished and job.revision == request.revision:
                return

    @call
    async def _wait(self, name: str, timeout: float | None = None) -> JobInfo:
        """Return a job once it has ended, in whatever way.

        Returns:
            The job as it ended; `phase` says how.

        Raises:
            OperationTimeoutError: If it does not in time; it goes on.

        Example:
            >>> job = client.jobs.wait("sft-1", timeout=3600)
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        job = await self._get(name)
        while not job.is_finished:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise OperationTimeoutError(
                    f"{job.name} is {job.phase or 'new'} after {timeout:g} s; it waits for: "
                    f"{job.waiting_for or 'its steps'}",
                    remedy="it goes on; wait longer, or look at its log",
                )
            await asyncio.sleep(_STREAM_PAUSE_S)
            job = await self._get(name)
        return job

    def logs(
        self,
        name: str,
        *,
        role: str = "driver",
        index: int = 0,
        follow: bool = False,
        tail_lines: int = 0,
    ) -> Iterator[str]:
        """Yield what a pod of a job printed, in whole lines.

        Args:
            name: Of the job.
            role: `driver`, `trainer`, `sampler` and so on.
            index: Number of the pod within the role.
            follow: Whether to go on until the job has ended.
            tail_lines: So many lines from the end; all if 0.

        Yields:
            The lines.

        Raises:
            NotFoundError: If the project has no job of this name.
            FailedPreconditionError: If the pod has printed nothing yet, or is gone
                (`JOB_LOG_MISSING`).

        Example:
            >>> for line in client.jobs.logs("sft-1", follow=True):
            ...     print(line)
        """
        request = job_pb2.ReadTrainingJobLogRequest(
            name=self._name(name), role=role, index=index, follow=follow, tail_lines=tail_lines
        )

        def go_on(part: job_pb2.ReadTrainingJobLogResponse) -> None:
            request.position = part.position

        for part in self._stream(lambda c: c.job.ReadTrainingJobLog, request, go_on):
            yield part.text

    @call
    async def _get_report(self, name: str, uid: str = "") -> job_pb2.TrainingJobReport:
        """Return what the driver of a job reported last, as it is on the wire.

        Returns:
            The report: step, metrics and checkpoint.

        Raises:
            NotFoundError: If the project has no job of this name.

        Example:
            >>> client.jobs.get_report("sft-1").step
        """
        request = job_pb2.GetTrainingJobReportRequest(name=self._name(name), uid=uid)
        answer: job_pb2.TrainingJobReport = await self._call(
            lambda c: c.job.GetTrainingJobReport, request
        )
        return answer

    @call
    async def _send_report(self, request: job_pb2.ReportTrainingJobRequest) -> None:
        """Report how far a job is, with its key; see `tinsmith.driver` for a better way.

        Raises:
            FailedPreconditionError: If the job has ended, or another has its name
                (`JOB_REPLACED`).

        Example:
            >>> client.jobs.send_report(request)
        """
        await self._call(lambda c: c.job.ReportTrainingJob, request)

    @call
    async def _has_diverged(self, run: str) -> bool:
        """Return whether a replay of a run gave other bits than the first execution.

        Returns:
            True from the first divergence on; the run's own record says where.

        Raises:
            NotFoundError: If there is no such run.

        Example:
            >>> client.jobs.has_diverged("projects/default/trainingRuns/1f0c")
        """
        message = await self._core.get_run(self._core.run_name(run))
        status = await self._core.transport.call(
            self._core.trainer_endpoint(message),
            lambda c: c.trainer.GetRunStatus,
            trainer_pb2.GetRunStatusRequest(run=message.name),
        )
        return bool(status.replay_diverged)

    def _name(self, value: str) -> str:
        if "/" not in value:
            return str(names.JobName(self._core.settings.project, value))
        return str(names.JobName.parse(value))

    async def _answer(self, method: Callable[[Connection], Any], request: Message) -> JobInfo:
        return _decode_job(await self._call(method, request))

    async def _call(self, method: Callable[[Connection], Any], request: Message) -> Any:
        return await self._core.transport.call(self._core.scheduler, method, request)

    def _stream(
        self,
        method: Callable[[Connection], Any],
        request: MessageT,
        go_on: Callable[[Any], None],
    ) -> Iterator[Any]:
        """Yield the messages of a stream; one that is cut off goes on where it was."""
        core = self._core
        backoff = Backoff(core.settings.retry)
        while True:
            stream: AsyncGenerator[Any, None] = core.transport.stream_once(
                core.scheduler, method, request, timeout_s=_STREAM_TIMEOUT_S
            )
            try:
                for message in core.background.iterate(stream):
                    go_on(message)
                    backoff = Backoff(core.settings.retry)
                    yield message
                return
            except TinsmithError as error:
                delay_s = backoff.delay_s(error, time.monotonic())
                if delay_s is None:
                    raise
                time.sleep(delay_s)


def _decode_job(message: job_pb2.TrainingJob) -> JobInfo:
    return JobInfo(
        name=message.name,
        uid=message.uid,
        phase=message.status.phase,
        waiting_for=message.status.waiting_for,
        spec=to_json(message.spec),
        status=to_json(message.status),
        labels=dict(message.labels),
        create_time=message.create_time.ToDatetime(datetime.UTC),
        revision=message.revision,
    )


def _read_manifest(manifest: str | Path | Mapping[str, Any]) -> object:
    if isinstance(manifest, Mapping):
        return manifest
    path = Path(manifest)
    found = [each for each in read_documents(path) if each is not None]
    if len(found) != 1:
        raise JobFormatError(f"{path} has {len(found)} documents; give each job its own file")
    return found[0]
