"""Statements on the jobs that the scheduler runs itself; each runs inside a transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from tinsmith.names import JobName
from tinsmith_scheduler.store.job_reports import job_not_found
from tinsmith_scheduler.store.records import Job, Json
from tinsmith_scheduler.store.tables import jobs


def insert_job(
    connection: sa.Connection,
    name: JobName,
    uid: str,
    spec: Json,
    labels: Mapping[str, str],
    *,
    request_digest: bytes,
    now_s: float,
) -> Job:
    """Add a job, and return it."""
    row = connection.execute(
        sa.insert(jobs)
        .values(
            name=str(name),
            project=name.project,
            uid=uid,
            spec=dict(spec),
            status={},
            labels=dict(labels),
            request_digest=request_digest,
            create_time_s=now_s,
            revision=1,
        )
        .returning(*jobs.c)
    ).one()
    return _job(row)


def find_job(connection: sa.Connection, name: JobName) -> tuple[Job, bytes] | None:
    """Return a job and the digest of the request that made it, or None."""
    row = connection.execute(sa.select(jobs).where(jobs.c.name == str(name))).first()
    return None if row is None else (_job(row), row.request_digest)


def get_job(connection: sa.Connection, name: JobName) -> Job:
    """Return a job.

    Raises:
        JobNotFoundError: If there is none of this name.
    """
    found = find_job(connection, name)
    if found is None:
        raise job_not_found(name)
    return found[0]


def list_jobs(
    connection: sa.Connection, project: str, *, before: int | None, limit: int
) -> list[tuple[int, Job]]:
    """Return jobs of a project with their serials, newest first."""
    query = (
        sa.select(jobs).where(jobs.c.project == project).order_by(jobs.c.serial.desc()).limit(limit)
    )
    if before is not None:
        query = query.where(jobs.c.serial < before)
    return [(row.serial, _job(row)) for row in connection.execute(query)]


def list_all(connection: sa.Connection) -> list[Job]:
    """Return all jobs, oldest first."""
    return [_job(row) for row in connection.execute(sa.select(jobs).order_by(jobs.c.serial))]


def update_job(connection: sa.Connection, job: Job, **values: Any) -> None:
    """Change `spec` or `status` of a job; one that is gone is left so."""
    connection.execute(
        sa.update(jobs)
        .where(jobs.c.name == job.name, jobs.c.uid == job.uid)
        .values(**values, revision=jobs.c.revision + 1)
    )


def delete_job(connection: sa.Connection, job: Job) -> None:
    """Forget a job."""
    connection.execute(sa.delete(jobs).where(jobs.c.name == job.name, jobs.c.uid == job.uid))


def _job(row: sa.Row[Any]) -> Job:
    return Job(
        name=row.name,
        uid=row.uid,
        spec=row.spec,
        status=row.status,
        labels=row.labels,
        create_time_s=row.create_time_s,
        revision=str(row.revision),
    )
