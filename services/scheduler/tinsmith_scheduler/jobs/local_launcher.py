"""Jobs on one machine: drivers are processes of it, trainers and samplers are the pods that serve.

Each pass observes every driver as a pod, asks the plan of the cluster's controller, and carries it
out. The status is stored first: a scheduler that is killed in between finds the driver running by
its lock, or sees by the stored pod name that it ended.
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
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from tinsmith.driver.agents import agent_key_variable
from tinsmith.names import JobName
from tinsmith_jobs.checkpoint_references import jobs_of, with_checkpoints
from tinsmith_jobs.method import describe_agents, describe_method
from tinsmith_jobs.plan import observed as plans
from tinsmith_jobs.plan.job_plan import plan_job
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.named_checkpoints import missing_checkpoints, note_found
from tinsmith_jobs.plan.retry_policy import begun_anew
from tinsmith_jobs.spec import DRIVER, JobSpec, Template
from tinsmith_jobs.status_codec import decode_status, encode_status
from tinsmith_runtime.errors import AlreadyExistsError, JobFinishedError, JobNotFoundError
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.rpc.auth import Caller, derive_job_key
from tinsmith_runtime.rpc.pod_identity import PodRole
from tinsmith_runtime.rpc.requests import decode_page_token, encode_page_token
from tinsmith_runtime.sql import Database
from tinsmith_runtime.variables import allowed_variables
from tinsmith_scheduler.auth.api_keys import Keys
from tinsmith_scheduler.jobs import job_store
from tinsmith_scheduler.jobs.driver_process import TERMINATION_LOG, DriverProcess
from tinsmith_scheduler.jobs.launcher import FINISHED_PHASES, has_failed
from tinsmith_scheduler.jobs.local_job import (
    GENERATION,
    as_time,
    check_spec,
    observe,
    read_job,
    with_node,
)
from tinsmith_scheduler.jobs.log_reader import read_file_log
from tinsmith_scheduler.store.job_reports import JobReports
from tinsmith_scheduler.store.records import (
    Job,
    JobReport,
    Json,
    LogPart,
    LogPosition,
    NewJobKey,
    PageRequest,
    Reach,
    WorkerRole,
)
from tinsmith_scheduler.workers.workers import Workers

logger = logging.getLogger(__name__)

_PASS_INTERVAL_S = 0.25
_STOP_POLL_S = 0.05
_BACKOFF_BASE_S, _BACKOFF_MAX_S = 2.0, 60.0
"""Times are stored in whole seconds, so the first pause lasts at least one."""
_MAX_PLANS = 8
"""Plans of one job in one pass: each that changes the status is followed by another."""
_PODS = Caller("", PodRole.CONTROLLER, "launcher")


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
        variables: Names of further variables of this process that drivers get.
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
        variables: frozenset[str] = frozenset(),
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._keys = keys
        self._reports = reports
        self._workers = workers
        self._folder = (data_dir / "jobs").absolute()
        self._max_jobs = max_jobs
        self._stop_timeout_s = stop_timeout_s
        self._further_variables = variables
        self._wall_clock = wall_clock
        # Derived anew by each process; what a driver of the one before has stays accepted.
        self._secret = secrets.token_urlsafe(32)
        self._address = ""
        self._drivers: dict[str, DriverProcess] = {}
        self._limits = Limits()
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._passed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def start(self, address: str) -> None:
        """Go on with the jobs of an earlier process."""
        self._address = address
        self._limits = Limits(
            backoff_base_s=_BACKOFF_BASE_S, backoff_max_s=_BACKOFF_MAX_S, endpoint=address
        )
        for job in await self._database.read(job_store.list_all):
            if _has_ended(job):
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
        check_spec(name, spec)
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

    async def retry(self, name: JobName) -> Job:
        """Let a failed job go on, once its driver has ended."""
        while True:
            # A pass that goes on would store the status that it planned from.
            async with self._lock:
                job = await self.get(name)
                if not has_failed(job):
                    return job
                if _has_ended(job):
                    await self._begin_anew(job)
                    return await self.get(name)
            await self._next_pass()

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
            await self._next_pass()
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

    async def _begin_anew(self, job: Job) -> None:
        status = encode_status(begun_anew(decode_status(job.status), GENERATION))
        self._driver(job).delete_pod()
        await self._database.write(
            lambda connection: job_store.update_job(connection, job, status=status)
        )
        self._changed.set()

    async def _next_pass(self) -> None:
        """Return after the next pass, or a while."""
        async with self._passed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PASS_INTERVAL_S * 4):
                    await self._passed.wait()

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
        found = [
            job
            for job in await self._database.read(job_store.list_all)
            if not _has_ended(job) or job.spec.get("ttlSecondsAfterFinished") is not None
        ]
        # Before the reports: of a driver that has ended, the last one is then among them.
        running = {job.uid for job in found if self._driver(job).is_running()}
        reports = {
            report.job: report
            for report in await self._reports.list([(job.name, job.uid) for job in found])
        }
        holders = {job.uid for job in found if _has_driver(job)}
        for job in found:
            await self._advance(job, reports.get(job.name), job.uid in running, holders)

    async def _named(self, job: plans.ObservedJob) -> dict[str, plans.ObservedJob]:
        """Return the jobs of the same project that a job names for their checkpoints."""
        found = {}
        for name in jobs_of(job.spec) if job.spec is not None else ():
            whole = JobName(job.key.namespace, name)
            with contextlib.suppress(JobNotFoundError):
                found[name] = read_job(await self.get(whole))
        return found

    async def _advance(
        self, job: Job, report: JobReport | None, is_running: bool, holders: set[str]
    ) -> None:
        """Plan for a job and carry the plan out, until its status stays as it is."""
        for _ in range(_MAX_PLANS):
            now_s = self._wall_clock()
            driver = self._driver(job)
            planned = read_job(job)
            named = await self._named(planned)
            planned = replace(planned, status=note_found(planned, named.get))
            observed = await asyncio.to_thread(observe, driver, report, is_running=is_running)
            observed = replace(
                observed,
                obstacle=next(missing_checkpoints(planned, named.get), "")
                or self._queue_problem(planned, holders),
                missing=self._missing_server(planned, "sampler" in job.spec.get("roles", {})),
            )
            plan = plan_job(planned, observed, as_time(now_s), self._limits)
            status = encode_status(with_node(plan.status))
            has_changed = status != job.status
            if has_changed:
                await self._database.write(
                    lambda connection, job=job, status=status: job_store.update_job(  # type: ignore[misc]
                        connection, job, status=status
                    )
                )
            for event in plan.events:
                logger.info(event.message, extra={"job": job.name, "reason": event.reason})
            if plan.delete_self:
                await self._forget(job)
                return
            spec = planned.spec
            if spec is not None:
                spec = with_checkpoints(spec, plan.status.named_checkpoints)
            grace_s = spec.scheduling.grace_s if spec is not None else 0
            for deletion in plan.delete:
                if not is_running:
                    driver.delete_pod()
                elif not driver.is_stopping:
                    stop_s = grace_s if deletion.grace_s is None else deletion.grace_s
                    await asyncio.to_thread(driver.stop, now_s, stop_s)
            await asyncio.to_thread(driver.kill_if_late, now_s)
            for assignment in plan.create:
                assert spec is not None
                await self._start_driver(job, spec, driver, assignment.pod)
            job = replace(job, status=status)
            if _has_driver(job):
                holders.add(job.uid)
            if has_changed and _has_ended(job):
                await self._keys.revoke_keys_of_job(job.name, job.uid, _PODS)
            if plan.create or not has_changed:
                return

    async def _start_driver(self, job: Job, spec: JobSpec, driver: DriverProcess, pod: str) -> None:
        name = JobName.parse(job.name)
        # Of each driver its own: a job that is tried again had the others revoked when it failed.
        key = derive_job_key(self._secret, f"{job.uid}/{pod}")
        await self._keys.ensure_job_key(
            NewJobKey(name, job.uid, key.key_id, key.secret_sha256, "", f"job {name.job}"), _PODS
        )
        role = spec.role(DRIVER)
        template = role.template if role is not None else Template()
        environment = {
            **allowed_variables(os.environ, self._further_variables),
            "PYTHONUNBUFFERED": "1",
            **{str(each["name"]): str(each.get("value", "")) for each in template.env},
            "TINSMITH_ADDRESS": self._address,
            "TINSMITH_API_KEY": str(key),
            "TINSMITH_PROJECT": name.project,
            "TINSMITH_JOB": job.name,
            "TINSMITH_JOB_UID": job.uid,
            "TINSMITH_JOB_METHOD": describe_method(
                spec, model=self._model_of(spec), data=spec.data.name
            ),
            "TINSMITH_JOB_AGENTS": describe_agents(
                spec, model=self._model_of(spec), address=self._address
            ),
            # One machine has one set of trainers and samplers, which agents share.
            **{agent_key_variable(agent.name): str(key) for agent in spec.agents},
            "TINSMITH_JOB_DIR": str(driver.folder / "files"),
            "TINSMITH_TERMINATION_LOG": str(driver.folder / TERMINATION_LOG),
            "TINSMITH_STATE_DIR": str(driver.folder),
        }
        own = (sys.executable, "-m", "tinsmith.driver.main")
        command = [*(template.command or own), *template.args]
        try:
            await asyncio.to_thread(driver.start, pod, command, environment)
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

    def _model_of(self, spec: JobSpec) -> str:
        """Return the base model of a job: with a pool, the one that is served."""
        if spec.model is not None:
            return spec.model.name
        served = {
            model.base_model
            for worker in self._workers.alive(WorkerRole.TRAINER)
            for model in worker.models
        }
        return min(served, default="")

    def _queue_problem(self, job: plans.ObservedJob, holders: Collection[str]) -> str:
        """Return why it is not the turn of a job, in a sentence; a service waits for no turn."""
        num_running = len(holders)
        if job.uid in holders or num_running < self._max_jobs:
            return ""
        if job.spec is None or job.spec.is_serving:
            return ""
        others = "another job" if num_running == 1 else f"one of {num_running} other jobs"
        return f"{others} to end: {self._max_jobs} may run at once (max_local_jobs)"

    def _missing_server(self, job: plans.ObservedJob, has_sampler: bool) -> str:
        """Return which server of its base model a job has to wait for, in a sentence."""
        if job.spec is None:
            return ""
        model = self._model_of(job.spec)
        reach = Reach(job.key.namespace, "")
        roles = [WorkerRole.TRAINER] if job.spec.method.trains else [WorkerRole.SAMPLER]
        if has_sampler:
            roles.append(WorkerRole.SAMPLER)
        for role in roles:
            alive = self._workers.alive(role, model) if model else []
            if not any(reach.includes(worker) for worker in alive):
                what = f"of the base model {model}" if model else "of any base model"
                return f"a {role.value} {what}, which is not there: start it with `tinsmith up`"
        return ""


def _has_driver(job: Job) -> bool:
    """Whether a job has one of the places for drivers; a service needs none."""
    return bool(job.status.get("assignments"))


def _has_ended(job: Job) -> bool:
    """Whether a job has ended, and its driver too."""
    return job.status.get("phase") in FINISHED_PHASES and not job.status.get("assignments")


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
