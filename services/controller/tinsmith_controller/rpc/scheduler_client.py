"""Client of the scheduler: keys of jobs, and the reports of their drivers."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from tinsmith.rpc.error_codec import status_of
from tinsmith.v1 import job_pb2, job_pb2_grpc
from tinsmith_jobs.plan.observed import Report
from tinsmith_jobs.status import Saved
from tinsmith_runtime.rpc.auth import ApiKey, derive_job_key
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole

_CALL_TIMEOUT_S = 10.0
_PAGE_SIZE = 1000
_MAX_JOBS = 1000


class SchedulerError(Exception):
    """The scheduler did not do what it was asked; the text is one sentence."""


class KeySpentError(SchedulerError):
    """A key was taken for good.

    Attributes:
        epoch: Of the driver whose key it was; None for that of the agents.
    """

    def __init__(self, epoch: int | None) -> None:
        super().__init__(f"the key of epoch {epoch} was revoked; the driver gets another")
        self.epoch = epoch


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """A job as the scheduler knows it.

    Attributes:
        name: `projects/{project}/trainingJobs/{job}`.
        uid: Tells it from others of the name.
    """

    name: str
    uid: str


class SchedulerClient:
    """The scheduler, as far as jobs are concerned.

    Args:
        address: `host:port` of the scheduler.
        credentials: Of the controller; keys of jobs are derived from its root secrets.
    """

    def __init__(self, address: str, credentials: PodCredentials) -> None:
        self._channel = credentials.open_blocking_channel(address, PodRole.SCHEDULER)
        self._stub: Any = job_pb2_grpc.JobServiceStub(self._channel)
        self._roots = credentials.roots
        self._metadata = credentials.metadata

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def settle_keys(
        self,
        job: JobIdentity,
        epochs: frozenset[int | None],
        *,
        generation: int,
        pools: Mapping[str, str],
    ) -> Mapping[int | None, Mapping[str, str]]:
        """Make the keys of some epochs good, once all others of the job are bad.

        Args:
            job: Whose keys.
            epochs: Of drivers; None means the keys of the agents' workers.
            generation: Tells the workers' keys from those of times before.
            pools: The pool that a key is bound to, by agent; the empty name is the job itself.

        Returns:
            The good keys, by epoch and agent. A driver has its own, whose name is empty, and one
            of each agent. Workers have that of their agent.

        Raises:
            KeySpentError: If one was made bad before.
            SchedulerError: If that is not known to have happened.
        """
        known_keys = self._good_keys(job.name)
        known_ids = {known.name.rpartition("/")[2] for known in known_keys}
        wanted: dict[tuple[int | None, str], ApiKey] = {}
        for epoch in epochs:
            for agent in pools:
                if epoch is None and not agent:
                    continue
                seed = _seed(job.uid, epoch, generation, agent)
                candidates = [derive_job_key(root, seed) for root in self._roots]
                # A job that began before the root secret was rotated keeps its key.
                in_use = (key for key in candidates if key.key_id in known_ids)
                wanted[epoch, agent] = next(in_use, candidates[0])
        ids = {key.key_id for key in wanted.values()}
        # Those of jobs that had the name before are bad too.
        for known in known_keys:
            if known.name.rpartition("/")[2] not in ids:
                self.revoke(known.name)
        found: dict[int | None, dict[str, str]] = {}
        for (epoch, agent), key in wanted.items():
            role = "agent" if epoch is None else "member"
            if self._call("EnsureJobKey", _ensure(job, key, pools[agent], role)).revoked:
                raise KeySpentError(epoch)
            found.setdefault(epoch, {})[agent] = str(key)
        return found

    def key_holders(self) -> Mapping[str, JobIdentity]:
        """Return the jobs of all good keys, by name of the key.

        Raises:
            SchedulerError: If the scheduler does not answer.
        """
        return {key.name: JobIdentity(key.job, key.uid) for key in self._good_keys("")}

    def revoke(self, key: str) -> None:
        """Make a key bad, by its name.

        Raises:
            SchedulerError: If that is not known to have happened.
        """
        self._call("RevokeJobKey", job_pb2.RevokeJobKeyRequest(name=key))

    def reports(self, jobs: Sequence[JobIdentity]) -> Mapping[str, Report]:
        """Return what drivers reported last, by uid of the job.

        Raises:
            SchedulerError: If the scheduler does not answer.
        """
        found: dict[str, Report] = {}
        for begin in range(0, len(jobs), _MAX_JOBS):
            request = job_pb2.ListTrainingJobReportsRequest(
                jobs=[
                    job_pb2.JobIdentity(name=job.name, uid=job.uid)
                    for job in jobs[begin : begin + _MAX_JOBS]
                ],
                page_size=_PAGE_SIZE,
            )
            # A report begins empty, with the first key of its job; no driver reported that.
            found |= {
                entry.uid: _report(entry)
                for entry in self._pages("ListTrainingJobReports", request, "reports")
                if entry.HasField("update_time")
            }
        return found

    def forget(self, job: JobIdentity) -> None:
        """Forget what the driver of a job reported.

        Raises:
            SchedulerError: If that is not known to have happened.
        """
        self._call(
            "DeleteTrainingJobReport",
            job_pb2.DeleteTrainingJobReportRequest(name=job.name, uid=job.uid),
        )

    def _good_keys(self, job: str) -> list[Any]:
        """Return the good keys of a job, and of jobs that had its name before; or of all jobs."""
        return self._pages(
            "ListJobKeys", job_pb2.ListJobKeysRequest(job=job, page_size=_PAGE_SIZE), "keys"
        )

    def _pages(self, method: str, request: Any, field: str) -> list[Any]:
        """Return the entries of all pages of a list."""
        found: list[Any] = []
        while True:
            answer = self._call(method, request)
            found += getattr(answer, field)
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    def _call(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(
                request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise SchedulerError(f"the scheduler refuses {method}: {_sentence(error)}") from error


def _seed(uid: str, epoch: int | None, generation: int, agent: str) -> str:
    """Return what a key is derived from: that of a driver or of workers, by agent."""
    holder = f"{uid}/agents/{generation}" if epoch is None else f"{uid}/driver/{epoch}"
    return f"{holder}/{agent}" if agent else holder


def _ensure(job: JobIdentity, key: ApiKey, pool: str, role: str) -> job_pb2.EnsureJobKeyRequest:
    return job_pb2.EnsureJobKeyRequest(
        job=job.name,
        uid=job.uid,
        key_id=key.key_id,
        secret_sha256=key.secret_sha256,
        pool=pool,
        display_name=f"job {job.name.rpartition('/')[2]}",
        role=role,
    )


def _report(entry: job_pb2.TrainingJobReport) -> Report:
    saved = None
    update_time = entry.update_time.ToDatetime(tzinfo=datetime.UTC)
    if entry.HasField("checkpoint"):
        saved = Saved(entry.checkpoint.name, entry.checkpoint.step)
    return Report(
        step=entry.step,
        max_steps=entry.max_steps,
        run=entry.run,
        update_time=update_time,
        metrics=dict(entry.metrics),
        checkpoint=saved,
        message=entry.message,
        has_succeeded=entry.outcome == job_pb2.TrainingJobReport.OUTCOME_SUCCEEDED,
        has_failed=entry.outcome == job_pb2.TrainingJobReport.OUTCOME_FAILED,
        has_diverged=entry.replay_diverged,
    )


def _sentence(error: grpc.RpcError) -> str:
    status = status_of(error)
    if status is not None:
        return str(status.message)
    return f"{error.code().name}: {error.details()}"
