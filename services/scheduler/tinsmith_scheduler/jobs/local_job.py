"""A job of one machine, as the plans of `tinsmith_jobs` see it.

The trainers and samplers of the machine serve every job, so the driver is the only pod of a job.
The driver is a process; its observation has the form that a pod of a cluster has.
"""

from __future__ import annotations

import datetime
from dataclasses import replace

from tinsmith.names import JobName
from tinsmith_jobs.naming import JOB_KIND, NamespacedName
from tinsmith_jobs.plan import observed as plans
from tinsmith_jobs.plan.failure_policy import FAILED_EXIT_CODE, SIGTERM_EXIT_CODE
from tinsmith_jobs.plan.termination import MAX_PROBLEM, describe_termination
from tinsmith_jobs.recipe_check import check_recipe
from tinsmith_jobs.spec import DRIVER, JobSpec, Method, Role
from tinsmith_jobs.spec_codec import decode_job
from tinsmith_jobs.spec_reader import SpecError
from tinsmith_jobs.status import Saved, Status
from tinsmith_jobs.status_codec import decode_status
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_scheduler.jobs.driver_process import DriverProcess
from tinsmith_scheduler.store.records import Job, JobOutcome, JobReport, Json

NODE = "local"
GENERATION = 1
_EXIT_CODES = {
    JobOutcome.SUCCEEDED: 0,
    JobOutcome.SAVED: SIGTERM_EXIT_CODE,
    JobOutcome.FAILED: FAILED_EXIT_CODE,
}


def check_spec(name: JobName, spec: Json) -> None:
    """Refuse a description that cannot be run on one machine.

    Raises:
        InvalidFieldError: If it breaks a rule, or only a cluster can run it; names the field.
    """
    try:
        job = decode_job(name.job, spec, is_local=True)
        check_recipe(job, is_local=True)
    except SpecError as error:
        problem = str(error).removeprefix(error.field).lstrip(": ")
        raise InvalidFieldError(error.field, problem) from error
    for field, is_set in (
        ("configMapRef", job.data.config_map),
        ("pvc", job.data.claim),
        ("name", job.data.object),
    ):
        if is_set:
            raise InvalidFieldError(
                f"spec.data.{field}",
                "needs a cluster; on one machine give the path of a file as "
                "spec.method.parameters.data",
            )
    if any(role.agent for role in job.roles):
        raise InvalidFieldError(
            "spec.roles.agents",
            "need a cluster for trainers, samplers and workers of their own; on one machine they "
            "share what serves there, so leave their roles out",
        )
    for role in job.roles:
        _check_template(role)
    driver = job.role(DRIVER)
    has_command = driver is not None and bool(driver.template.command)
    if job.method is Method.CUSTOM and not has_command:
        raise InvalidFieldError(
            "spec.roles.driver.template.command", "is needed: one machine runs no images"
        )


def _check_template(role: Role) -> None:
    """Refuse what only the pods of a cluster can have; images are not used here, and may stand."""
    template = role.template
    path = f"spec.roles.{role.kind}.template"
    for field, is_set in (
        ("env", any("valueFrom" in entry for entry in template.env)),
        ("envFrom", template.env_from),
        ("volumes", template.volumes),
        ("initContainers", template.init_containers),
    ):
        if is_set:
            what = "takes a value from a cluster" if field == "env" else "needs a cluster"
            raise InvalidFieldError(
                f"{path}.{field}",
                f"{what}; on one machine a driver has the files and variables of the server, and "
                "env with a value",
            )


def read_job(job: Job) -> plans.ObservedJob:
    """Return a stored job for a plan: its driver is the one role, and needs no node."""
    name = JobName.parse(job.name)
    spec: JobSpec | None = None
    problem = ""
    try:
        found = decode_job(name.job, job.spec, is_local=True)
        driver = found.role(DRIVER)
        roles = () if driver is None else (replace(driver, gpus=0),)
        spec = replace(found, roles=roles)
    except SpecError as error:
        problem = str(error)
    return plans.ObservedJob(
        key=NamespacedName(JOB_KIND, name.project, name.job),
        uid=job.uid,
        generation=GENERATION,
        created=as_time(job.create_time_s),
        spec=spec,
        spec_error=problem,
        status=decode_status(job.status),
    )


def with_node(status: Status) -> Status:
    """Return a status whose driver runs on this machine."""
    return replace(
        status, assignments=tuple(replace(entry, node=NODE) for entry in status.assignments)
    )


def observe(driver: DriverProcess, report: JobReport | None, *, is_running: bool) -> plans.Observed:
    """Return the driver of a job as the one pod that the job has.

    An outcome that an earlier process reported says nothing about the one that was started last.

    Args:
        driver: The process; reads its files.
        report: What drivers of the job reported last, read after `is_running`.
        is_running: Whether the process runs.
    """
    pod = driver.pod
    update_time_s = report.update_time_s if report is not None else None
    if report is None or update_time_s is None:
        seen, outcome = None, JobOutcome.NONE
    else:
        is_current = bool(pod) and update_time_s >= driver.start_time_s
        outcome = report.outcome if is_current else JobOutcome.NONE
        seen = plans.Report(
            step=report.step,
            max_steps=report.max_steps,
            run=report.run,
            update_time=as_time(update_time_s),
            metrics=report.metrics,
            checkpoint=Saved(report.checkpoint, report.checkpoint_step)
            if report.checkpoint
            else None,
            message=report.message,
            has_succeeded=outcome is JobOutcome.SUCCEEDED,
            has_failed=outcome is JobOutcome.FAILED,
        )
    if not pod:
        return plans.Observed(report=seen)
    view = plans.PodView(
        name=pod,
        uid=pod,
        role=DRIVER,
        index=0,
        phase=plans.PodPhase.RUNNING,
        is_ready=is_running,
        is_deleting=driver.is_stopping,
        node=NODE,
    )
    if not is_running:
        # The scheduler that started the process may be gone, and its exit code with it.
        code = driver.exit_code
        code = _EXIT_CODES.get(outcome) if code is None else code
        termination, log_tail = driver.read_end()
        said = seen.message if seen is not None and seen.has_failed else ""
        problem = describe_termination(termination) or said or describe_termination(log_tail)
        view = replace(
            view,
            phase=plans.PodPhase.SUCCEEDED if code == 0 else plans.PodPhase.FAILED,
            exit_code=code,
            problem=problem[:MAX_PROBLEM],
        )
    return plans.Observed(pods={pod: view}, report=seen)


def as_time(time_s: float) -> datetime.datetime:
    """Return seconds since the epoch as a point in time."""
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC)
