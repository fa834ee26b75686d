"""The protocol of a launcher, which runs jobs on this machine or in a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from tinsmith.names import JobName
from tinsmith_jobs.conditions import ENDED, Phase
from tinsmith_runtime.errors import JobFinishedError
from tinsmith_runtime.records import RequestIdentity
from tinsmith_scheduler.store.records import Job, Json, LogPart, LogPosition, PageRequest

FINISHED_PHASES = frozenset(phase.value for phase in ENDED)


def has_failed(job: Job) -> bool:
    """Return whether a job may be tried again; one that has not ended needs no such thing.

    Raises:
        JobFinishedError: If it has ended in another way.
    """
    phase = job.status.get("phase")
    if phase in FINISHED_PHASES and phase != Phase.FAILED.value:
        raise JobFinishedError(
            f"job {job.name} is {phase}, and only one that failed can be tried again", job=job.name
        )
    return phase == Phase.FAILED.value


class Launcher(Protocol):
    """Runs jobs.

    All methods on a name raise `JobNotFoundError` if there is no such job. A cluster that does not
    answer is `ClusterUnavailableError`, one that refuses `ClusterRefusedError`.
    """

    async def start(self, address: str) -> None:
        """Go on with what there is.

        Args:
            address: Where drivers connect that this launcher starts itself.
        """
        ...

    async def stop(self) -> None:
        """Let drivers that this process started save and end; they go on after the next start."""
        ...

    async def create(
        self, name: JobName, spec: Json, labels: Mapping[str, str], request: RequestIdentity
    ) -> Job:
        """Take a job in; the same request gives the same job.

        Raises:
            AlreadyExistsError: If there is another job of the name.
            InvalidFieldError: If the description is refused.
        """
        ...

    async def get(self, name: JobName) -> Job:
        """Return a job."""
        ...

    async def list(self, project: str, page: PageRequest) -> tuple[list[Job], str]:
        """Return jobs of a project, and the token that goes on."""
        ...

    async def cancel(self, name: JobName) -> Job:
        """Save and end a job for good."""
        ...

    async def set_suspended(self, name: JobName, *, suspended: bool) -> Job:
        """Let a job wait, or go on.

        Raises:
            JobFinishedError: If it has ended.
        """
        ...

    async def retry(self, name: JobName) -> Job:
        """Let a failed job go on; one that has not ended is left as it is.

        Raises:
            JobFinishedError: If it has ended in another way.
        """
        ...

    async def delete(self, name: JobName) -> None:
        """End a job and forget it; one that is gone is left as it is."""
        ...

    def watch(self, name: JobName, revision: str) -> AsyncIterator[Job]:
        """Yield a job whenever it has another revision, until it has ended or is gone."""
        ...

    def read_log(self, name: JobName, wanted: LogPosition) -> AsyncIterator[LogPart]:
        """Yield what a pod of a job printed.

        Raises:
            JobLogMissingError: If there is no such pod, or it has not started.
        """
        ...
