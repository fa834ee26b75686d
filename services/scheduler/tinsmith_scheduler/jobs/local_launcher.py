"""Jobs on one machine: drivers are processes of it, trainers and samplers are the pods that serve.

A pass over all jobs is made as often as something can have changed. What it decides is written down
before it is done: a scheduler that is killed in between takes the driver for one that ended, or
finds it running by its lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import sqlalchemy as sa

from tinsmith.names import JobName
from tinsmith_runtime.errors import AlreadyExistsError, JobFinishedError, JobNotFoundError
from tinsmith_runtime.rpc.auth import POD_SCOPE, Caller, derive_job_key
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.auth.api_keys import Keys
from tinsmith_scheduler.jobs import job_store
from tinsmith_scheduler.jobs.driver_process import DriverProcess
from tinsmith_scheduler.jobs.launcher import FINISHED_PHASES
from tinsmith_scheduler.jobs.local_state_machine import Action, Observed, decide
from tinsmith_scheduler.jobs.log_reader import read_file_log
from tinsmith_scheduler.jobs.spec_rules import check_local, check_spec, describe_method, look_up
from tinsmith_scheduler.store.database import decode_page_token, encode_page_token
from tinsmith_scheduler.store.job_reports import JobReports
from tinsmith_scheduler.store.records import (
    Job,
    Json,
    LogPart,
    LogPosition,
    NewJobKey,
    PageRequest,
    Reach,
    RequestIdentity,
    WorkerRole,
)
from tinsmith_scheduler.workers.workers import Workers

logger = logging.getLogger(__name__)

_PASS_INTERVAL_S = 0.25
_STOP_POLL_S = 0.05
_PODS = Caller("", frozenset({POD_SCOPE}), "launcher")


class LocalLauncher:
    """Implements `Launcher` on this machine.

    Args:
        database: Where jobs are kept.
        keys: Makes the keys of drivers.
        reports: What drivers reported.
        workers: Which base models are served.
        data_dir: Logs and files of drivers go below it.
        max_jobs: Drivers that run at once.
        stop_timeout_s: Time that drivers get to save in when the server stops.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        keys: Keys,
        reports: JobReports,
        workers: Workers,
        data_dir: Path,
        max_jobs: int,
        stop_timeout_s: float,
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._keys = keys
        self._reports = reports
        self._workers = workers
        self._folder = (data_dir / "jobs").absolute()
        self._max_jobs = max_jobs
        self._stop_timeout_s = stop_timeout_s
        self._wall_clock = wall_clock
        # Derived anew by each process; what a driver of the one before has stays accepted.
        self._secret = secrets.token_urlsafe(32)
        self._address = ""
        self._drivers: dict[str, DriverProcess] = {}
        self._stop_times_s: dict[str, float] = {}
        self._first_steps: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._passed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def start(self, address: str) -> None:
        """Go on with the jobs of an earlier process."""
        self._address = address
        for job in await self._database.read(job_store.list_all):
            if job.status.get("phase") in FINISHED_PHASES:
                # Should the process before have ended between the two.
                await self._keys.revoke_keys_of_job(job.name, job.uid, _PODS)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Let drivers save and end; they go on after the next start."""
        task, self._task = self._task, None
        if task is None:
            return
        # Not in the middle of a pass: a driver that is being started in a thread would be missed.
        async with self._lock:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        running = [driver for driver in self._drivers.values() if driver.is_running()]
        for driver in running:
            driver.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + self._stop_timeout_s
        while any(driver.is_running() for driver in running):
            if time.monotonic() > deadline_s:
                logger.warning("drivers did not save in time")
                for driver in running:
                    driver.send_signal(signal.SIGKILL)
                break
            await asyncio.sleep(_STOP_POLL_S)

    async def create(
        self, name: JobName, spec: Json, labels: Mapping[str, str], request: RequestIdentity
    ) -> Job:
        """Take a job in."""
        check_spec(spec)
        check_local(spec)
        now_s = self._wall_clock()

        def write(connection: sa.Connection) -> Job:
            found = job_store.find_job(connection, name)
            if found is None:
                return job_store.insert_job(
                    connection,
                    name,
                    str(uuid.uuid4()),
                    spec,
                    labels,
                    request_digest=request.digest,
                    now_s=now_s,
                )
            if found[1] != request.digest:
                raise AlreadyExistsError(f"job {name} exists", job=name)
            return found[0]

        job = await self._database.write(write)
        self._changed.set()
        return job

    async def get(self, name: JobName) -> Job:
        """Return a job."""
        return await self._database.read(lambda connection: job_store.get_job(connection, name))

    async def list(self, project: str, page: PageRequest) -> tuple[list[Job], str]:
        """Return jobs of a project, newest first."""
        list_name = f"projects/{project}/trainingJobs"
        before = decode_page_token(list_name, page.token)
        found = await self._database.read(
            lambda connection: job_store.list_jobs(
                connection, project, before=before, limit=page.size + 1
            )
        )
        shown = found[: page.size]
        more = len(found) > len(shown)
        token = encode_page_token(list_name, shown[-1][0]) if more else ""
        return [job for _, job in shown], token

    async def cancel(self, name: JobName) -> Job:
        """Save and end a job for good."""
        return await self._change(name, {"cancel": True}, must_run=False)

    async def set_suspended(self, name: JobName, *, suspended: bool) -> Job:
        """Let a job wait, or go on."""
        return await self._change(name, {"suspend": suspended}, must_run=True)

    async def delete(self, name: JobName) -> None:
        """End a job at once and forget it."""
        # A pass that goes on would start the driver again.
        async with self._lock:
            try:
                job = await self.get(name)
            except JobNotFoundError:
                return
            driver = self._driver(job)
            await asyncio.to_thread(driver.send_signal, signal.SIGKILL)
            await self._forget(job)

    async def watch(self, name: JobName, revision: str) -> AsyncIterator[Job]:
        """Yield a job whenever it changes, until it has ended or is gone."""
        job = await self.get(name)
        while True:
            if job.revision != revision:
                yield job
                revision = job.revision
            if job.status.get("phase") in FINISHED_PHASES:
                return
            async with self._passed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PASS_INTERVAL_S * 4):
                        await self._passed.wait()
            try:
                job = await self.get(name)
            except JobNotFoundError:
                return

    async def read_log(self, name: JobName, wanted: LogPosition) -> AsyncIterator[LogPart]:
        """Yield what a driver printed; the other pods print into the log of the server."""
        job = await self.get(name)

        async def has_ended() -> bool:
            try:
                return (await self.get(name)).status.get("phase") in FINISHED_PHASES
            except JobNotFoundError:
                return True

        async for part in read_file_log(str(name), self._driver(job).log, wanted, has_ended):
            yield part

    async def _change(self, name: JobName, values: Json, *, must_run: bool) -> Job:
        def write(connection: sa.Connection) -> Job:
            job = job_store.get_job(connection, name)
            if job.status.get("phase") in FINISHED_PHASES:
                if must_run:
                    raise JobFinishedError(f"job {name} is {job.status['phase']}", job=name)
                return job
            job_store.update_job(connection, job, spec={**job.spec, **values})
            return job_store.get_job(connection, name)

        job = await self._database.write(write)
        self._changed.set()
        return job

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                async with self._lock:
                    await self._pass()
            except Exception:
                logger.exception("a pass over the jobs failed")
            async with self._passed:
                self._passed.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PASS_INTERVAL_S):
                    await self._changed.wait()

    async def _pass(self) -> None:
        found = await self._database.read(job_store.list_all)
        open_jobs = [job for job in found if job.status.get("phase") not in FINISHED_PHASES]
        # Before the reports: of a driver that has ended, the last one is then among them.
        running = {job.uid for job in open_jobs if self._driver(job).is_running()}
        reports = {
            report.job: report
            for report in await self._reports.list([(job.name, job.uid) for job in open_jobs])
        }
        for job in found:
            driver, is_running = self._driver(job), job.uid in running
            report = reports.get(job.name)
            if is_running and job.uid not in self._first_steps and report is not None:
                # Started by the process before.
                self._first_steps[job.uid] = report.step
            seen = Observed(
                is_running=is_running,
                has_ended=not is_running and bool(job.status.get("assignments")),
                exit_code=driver.exit_code,
                stop_time_s=self._stop_times_s.get(job.uid),
                report=report,
                first_step=self._first_steps.get(job.uid, 0),
                model_problem=self._model_problem(job),
                queue_problem=_queue_problem(len(running), self._max_jobs),
                endpoint=self._address,
            )
            job_id = JobName.parse(job.name).job
            decision = decide(job_id, job.spec, job.status, seen, self._wall_clock())
            if decision.action is Action.START:
                running.add(job.uid)
            if decision.status != job.status:
                await self._database.write(
                    lambda connection, job=job, decision=decision: job_store.update_job(  # type: ignore[misc]
                        connection, job, status=decision.status
                    )
                )
            await self._act(job, driver, decision.action)
            if job in open_jobs and decision.status.get("phase") in FINISHED_PHASES:
                await self._keys.revoke_keys_of_job(job.name, job.uid, _PODS)

    async def _act(self, job: Job, driver: DriverProcess, action: Action) -> None:
        match action:
            case Action.START:
                await self._start_driver(job, driver)
            case Action.STOP:
                self._stop_times_s[job.uid] = self._wall_clock()
                await asyncio.to_thread(driver.send_signal, signal.SIGTERM)
            case Action.KILL:
                await asyncio.to_thread(driver.send_signal, signal.SIGKILL)
            case Action.FORGET:
                await self._forget(job)

    async def _start_driver(self, job: Job, driver: DriverProcess) -> None:
        name = JobName.parse(job.name)
        key = derive_job_key(self._secret, job.uid)
        await self._keys.ensure_job_key(
            NewJobKey(name, job.uid, key.key_id, key.secret_sha256, "", f"job {name.job}"), _PODS
        )
        report = await self._reports.find(job.name)
        self._first_steps[job.uid] = report.step if report is not None else 0
        self._stop_times_s.pop(job.uid, None)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TINSMITH_")},
            "PYTHONUNBUFFERED": "1",
            **{
                each["name"]: each.get("value", "")
                for each in look_up(job.spec, "roles", "driver", "template", "env", default=[])
            },
            "TINSMITH_ADDRESS": self._address,
            "TINSMITH_API_KEY": str(key),
            "TINSMITH_PROJECT": name.project,
            "TINSMITH_JOB": job.name,
            "TINSMITH_JOB_UID": job.uid,
            "TINSMITH_JOB_METHOD": describe_method(job.spec, self._model_of(job)),
            "TINSMITH_JOB_DIR": str(driver.folder / "files"),
            "TINSMITH_TERMINATION_LOG": str(driver.folder / "termination.log"),
            "TINSMITH_STATE_DIR": str(driver.folder),
        }
        template = look_up(job.spec, "roles", "driver", "template", default={})
        command = [*template.get("command", []), *template.get("args", [])]
        if not template.get("command"):
            command = [sys.executable, "-m", "tinsmith.driver.main"]
        try:
            await asyncio.to_thread(driver.start, command, environment)
        except OSError as error:
            # Taken for a driver that ended at once, which is restarted or given up like any other.
            logger.warning("driver not started", extra={"job": job.name, "problem": str(error)})
            await asyncio.to_thread(_append, driver.log, f"{command[0]}: {error.strerror}\n")

    async def _forget(self, job: Job) -> None:
        await self._keys.revoke_keys_of_job(job.name, job.uid, _PODS)
        await self._database.write(lambda connection: job_store.delete_job(connection, job))
        await self._reports.delete(JobName.parse(job.name), job.uid)
        driver = self._drivers.pop(job.uid, None)
        if driver is not None:
            await asyncio.to_thread(shutil.rmtree, driver.folder, ignore_errors=True)

    def _driver(self, job: Job) -> DriverProcess:
        driver = self._drivers.get(job.uid)
        if driver is None:
            driver = self._drivers[job.uid] = DriverProcess(self._folder / job.uid)
        return driver

    def _model_of(self, job: Job) -> str:
        """Return the base model of a job: with a pool, the one that is served."""
        named: str = look_up(job.spec, "model", "name", default="")
        if named:
            return named
        served = {
            model.base_model
            for worker in self._workers.alive(WorkerRole.TRAINER)
            for model in worker.models
        }
        return min(served, default="")

    def _model_problem(self, job: Job) -> str:
        """Return why the base model of a job cannot be used now, in a sentence."""
        model = self._model_of(job)
        reach = Reach(JobName.parse(job.name).project, "")
        kind = look_up(job.spec, "method", "type")
        roles = [WorkerRole.SAMPLER] if kind == "serve" else [WorkerRole.TRAINER]
        if "sampler" in job.spec.get("roles", {}):
            roles.append(WorkerRole.SAMPLER)
        for role in roles:
            alive = self._workers.alive(role, model) if model else []
            if not any(reach.includes(worker) for worker in alive):
                what = f"of the base model {model}" if model else "of any base model"
                return f"a {role.value} {what}, which is not there: start it with `tinsmith up`"
        return ""


def _queue_problem(num_running: int, limit: int) -> str:
    if num_running < limit:
        return ""
    others = "another job" if num_running == 1 else f"one of {num_running} other jobs"
    return f"{others} to end: {limit} may run at once (max_local_jobs)"


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
