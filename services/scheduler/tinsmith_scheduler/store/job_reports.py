"""Reports of drivers: one row for each job, which only the key of that job writes.

The row is made with the key. A new job of the same name replaces the row, so that late reports of
the older driver are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import sqlalchemy as sa

from tinsmith.names import JobName
from tinsmith_runtime.errors import JobNotFoundError, JobReplacedError, RoleMissingError
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.sql import Database, insert
from tinsmith_scheduler.store.records import JobOutcome, JobReport, JobUpdate, Key
from tinsmith_scheduler.store.tables import job_reports


class JobReports:
    """The reports of all jobs.

    Args:
        database: Where they are kept.
        key_of: Returns the key that a caller calls with.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        key_of: Callable[[Caller], Key],
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._key_of = key_of
        self._wall_clock = wall_clock

    async def report(self, caller: Caller, name: JobName, uid: str, update: JobUpdate) -> JobReport:
        """Take a driver's report over what it reported before, and return the whole.

        Raises:
            RoleMissingError: If the caller is not the driver of the job.
            JobReplacedError: If another job has the name now.
        """
        key = self._key_of(caller)
        if (key.job, key.job_uid) != (str(name), uid):
            raise RoleMissingError(
                f"only the key of job {name} may report for it", role="job", key_id=caller.key_id
            )
        now_s = self._wall_clock()

        def write(connection: sa.Connection) -> JobReport:
            known = _get(connection, str(name))
            if known is None or known.uid != uid:
                raise _replaced(name, uid)
            merged = merge_update(known, update, now_s=now_s)
            connection.execute(
                sa.update(job_reports)
                .where(job_reports.c.job == str(name))
                .values(
                    step=merged.step,
                    max_steps=merged.max_steps,
                    metrics=dict(merged.metrics),
                    run=merged.run,
                    checkpoint=merged.checkpoint,
                    checkpoint_step=merged.checkpoint_step,
                    state=merged.state,
                    message=merged.message,
                    outcome=merged.outcome.value,
                    update_time_s=merged.update_time_s,
                    step_time_s=merged.step_time_s,
                    replay_diverged=merged.replay_diverged,
                )
            )
            return merged

        return await self._database.write(write)

    async def get(self, name: JobName, uid: str) -> JobReport:
        """Return what was reported last.

        Args:
            name: Of the job.
            uid: Which job of the name; empty for the newest.

        Raises:
            JobNotFoundError: If no driver of such a job was ever given a key.
            JobReplacedError: If another job has the name now.
        """
        known = await self.find(str(name))
        if known is None:
            raise job_not_found(name)
        if uid and known.uid != uid:
            raise _replaced(name, uid)
        return known

    async def find(self, name: str) -> JobReport | None:
        """Return what was reported last under a name, or None."""
        return await self._database.read(lambda connection: _get(connection, name))

    async def list(self, jobs: Sequence[tuple[str, str]]) -> list[JobReport]:
        """Return what was reported of jobs given by name and uid, without states."""
        wanted = dict(jobs)
        columns = [column for column in job_reports.c if column.name != "state"]
        query = sa.select(*columns).where(job_reports.c.job.in_(list(wanted)))
        found = await self._database.read(
            lambda connection: [_report(row) for row in connection.execute(query)]
        )
        return [report for report in found if report.uid == wanted[report.job]]

    async def delete(self, name: JobName, uid: str) -> None:
        """Forget what a job reported; repeating it succeeds."""
        statement = sa.delete(job_reports).where(
            job_reports.c.job == str(name), job_reports.c.uid == uid
        )
        await self._database.write(lambda connection: connection.execute(statement))


def begin_report(connection: sa.Connection, job: str, uid: str) -> None:
    """Make the empty report of a job, in the place of that of another one of the name."""
    known = _get(connection, job)
    if known is not None and known.uid == uid:
        return
    values = {
        "uid": uid,
        "step": 0,
        "max_steps": 0,
        "metrics": {},
        "run": "",
        "checkpoint": "",
        "checkpoint_step": 0,
        "state": b"",
        "message": "",
        "outcome": JobOutcome.NONE.value,
        "update_time_s": None,
        "step_time_s": None,
        "replay_diverged": False,
    }
    connection.execute(
        insert(connection, job_reports)
        .values(job=job, **values)
        .on_conflict_do_update(index_elements=["job"], set_=values)
    )


def merge_update(known: JobReport, update: JobUpdate, *, now_s: float) -> JobReport:
    """Return a report with what is new in it."""
    moved = update.step is not None and (known.step_time_s is None or update.step != known.step)
    checkpoint, checkpoint_step = update.checkpoint or (known.checkpoint, known.checkpoint_step)
    return replace(
        known,
        step=known.step if update.step is None else update.step,
        max_steps=known.max_steps if update.max_steps is None else update.max_steps,
        metrics=update.metrics or known.metrics,
        run=known.run if update.run is None else update.run,
        checkpoint=checkpoint,
        checkpoint_step=checkpoint_step,
        state=known.state if update.state is None else update.state,
        message=known.message if update.message is None else update.message,
        outcome=update.outcome,
        update_time_s=now_s,
        step_time_s=now_s if moved else known.step_time_s,
        replay_diverged=known.replay_diverged or update.replay_diverged,
    )


def job_not_found(name: JobName) -> JobNotFoundError:
    """Return the error of a job that does not exist, or is not the caller's."""
    return JobNotFoundError(f"job {name} does not exist", job=name)


def _replaced(name: JobName, uid: str) -> JobReplacedError:
    return JobReplacedError(f"job {name} of uid {uid} was deleted", job=name, uid=uid)


def _get(connection: sa.Connection, job: str) -> JobReport | None:
    row = connection.execute(sa.select(job_reports).where(job_reports.c.job == job)).first()
    return None if row is None else _report(row)


def _report(row: sa.Row[tuple[object, ...]]) -> JobReport:
    values = dict(row._mapping)
    return JobReport(**{**values, "outcome": JobOutcome(values["outcome"])})
