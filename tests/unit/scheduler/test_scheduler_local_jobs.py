"""A job of one machine: its driver is observed as a pod, and the plan of a cluster decides."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinsmith.names import JobName
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.plan.actions import Plan
from tinsmith_jobs.plan.job_plan import plan_job
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import PodPhase
from tinsmith_jobs.status_codec import encode_status
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_scheduler.jobs.driver_process import TERMINATION_LOG, DriverProcess
from tinsmith_scheduler.jobs.local_job import as_time, check_spec, observe, read_job, with_node
from tinsmith_scheduler.store.records import Job, JobOutcome, JobReport

NOW = 1_800_000_000.0
LIMITS = Limits(backoff_base_s=2.0, backoff_max_s=60.0, endpoint="here:1")
SPEC: dict[str, Any] = {"model": {"name": "m"}, "method": {"type": "supervised", "maxSteps": 10}}
SERVE: dict[str, Any] = {
    "model": {"name": "m"},
    "method": {"type": "serve"},
    "roles": {"sampler": {}},
}
REPORT = JobReport("j", "u", step=4, max_steps=10, update_time_s=NOW + 5, step_time_s=NOW + 5)


class Life:
    """A job, its driver in a folder, and a clock; nothing runs."""

    def __init__(self, folder: Path, spec: dict[str, Any] = SPEC) -> None:
        self.driver = DriverProcess(folder)
        self.job = Job("projects/p/trainingJobs/j", "u", spec, {}, {}, NOW, "1")
        self.now_s = NOW
        self.is_running = False
        self.report: JobReport | None = None
        self.missing = ""
        self.obstacle = ""

    def step(self, after_s: float = 0.0, **spec: Any) -> Plan:
        """Plan once and store the status; pods are started and deleted by name alone."""
        self.now_s += after_s
        self.job = replace(self.job, spec={**self.job.spec, **spec})
        observed = observe(self.driver, self.report, is_running=self.is_running)
        observed = replace(observed, missing=self.missing, obstacle=self.obstacle)
        plan = plan_job(read_job(self.job), observed, as_time(self.now_s), LIMITS)
        self.job = replace(self.job, status=encode_status(with_node(plan.status)))
        for entry in plan.create:
            self.start(entry.pod)
        if plan.delete and not self.is_running:
            self.driver.delete_pod()
        return plan

    def settle(self, after_s: float = 0.0, **spec: Any) -> dict[str, Any]:
        """Plan until nothing changes; return the status."""
        self.now_s += after_s
        before = None
        while before != self.job.status:
            before = self.job.status
            self.step(**spec)
        return dict(self.job.status)

    def start(self, pod: str) -> None:
        self.driver.folder.mkdir(exist_ok=True)
        (self.driver.folder / "driver.pod").write_text(pod)
        os.utime(self.driver.folder / "driver.pod", (self.now_s, self.now_s))
        self.is_running = True

    def end(self, outcome: JobOutcome, message: str = "", log: str = "") -> None:
        """Let the driver end, under a scheduler that does not know its exit code."""
        self.is_running = False
        self.report = replace(
            self.report or REPORT, outcome=outcome, message=message, update_time_s=self.now_s
        )
        self.driver.log.write_text(log)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path / "u")


def test_a_job_is_started_runs_and_succeeds(life: Life) -> None:
    status = life.settle()
    assert life.is_running
    (entry,) = status["assignments"]
    assert (entry["pod"], entry["node"], status["epoch"]) == ("j-driver-0-e1", "local", 1)
    assert (status["phase"], status["nodesSummary"]) == ("Running", "local")
    life.report = replace(REPORT, metrics={"reward": 0.25}, checkpoint="c", checkpoint_step=4)
    progress = life.settle(after_s=5)["progress"]
    assert (progress["summary"], progress["percent"], progress["reward"]) == ("4/10", 40, "0.25")
    # Four steps took five seconds, six are left.
    assert progress["eta"] == "0m07s"
    life.now_s += 15
    life.end(JobOutcome.SUCCEEDED)
    status = life.settle()
    assert (status["phase"], status["activeSeconds"]) == ("Succeeded", 20)
    assert status["checkpoint"]["final"]["name"] == "c"
    assert "assignments" not in status
    assert status == life.settle(after_s=100)


@pytest.mark.parametrize(
    ("wanted", "going", "gone"),
    [
        ({"suspend": True}, "Suspending", "Suspended"),
        ({"cancel": True}, "Cancelling", "Cancelled"),
        ({"cancel": True, "suspend": True}, "Cancelling", "Cancelled"),
    ],
    ids=["suspend", "cancel", "both"],
)
def test_a_driver_is_told_to_save(
    life: Life, wanted: dict[str, bool], going: str, gone: str
) -> None:
    life.settle()
    plan = life.step(scheduling={"preemptionGraceSeconds": 9}, **wanted)
    assert (plan.status.phase.value, [entry.grace_s for entry in plan.delete]) == (going, [9])
    life.end(JobOutcome.SAVED)
    assert life.settle()["phase"] == gone
    if gone == "Suspended":
        status = life.settle(suspend=False)
        assert (status["phase"], status["epoch"]) == ("Running", 2)


@pytest.mark.parametrize(
    ("outcome", "message", "log", "phase", "problem"),
    [
        pytest.param(JobOutcome.SAVED, "", "", "Restarting", None, id="saved"),
        pytest.param(
            JobOutcome.FAILED, "no such data", "", "Failed",
            "driver 0 ended with exit code 1: no such data", id="failed-for-good",
        ),
        pytest.param(
            JobOutcome.NONE, "", "one\ntwo\n", "Restarting",
            "driver 0 ended with no exit code: two", id="killed",
        ),
    ],
)  # fmt: skip
def test_the_end_of_a_driver_that_an_earlier_scheduler_started(
    life: Life, outcome: JobOutcome, message: str, log: str, phase: str, problem: str | None
) -> None:
    life.settle()
    life.now_s += 5
    life.end(outcome, message, log)
    status = life.settle()
    assert status["phase"] == phase
    assert status.get("failure", {}).get("message") == problem
    assert status["restartCount"] == (1 if outcome is JobOutcome.NONE else 0)


def test_what_an_earlier_process_reported_is_not_taken_for_this_ones(life: Life) -> None:
    life.report = replace(REPORT, update_time_s=NOW - 5, outcome=JobOutcome.SUCCEEDED)
    life.settle()
    life.is_running = False
    assert life.settle()["restartCount"] == 1


def test_failures_are_restarted_with_a_pause_until_they_are_too_many(life: Life) -> None:
    life.settle()
    life.end(JobOutcome.NONE)
    status = life.settle(backoffLimit=1)
    assert (status["phase"], life.is_running) == ("Restarting", False)
    assert "pauses 2 s after a failure" in status["waitingFor"]
    assert life.settle(after_s=1)["phase"] == "Restarting"
    assert life.settle(after_s=1)["phase"] == "Running"
    life.end(JobOutcome.NONE)
    status = life.settle()
    assert (status["phase"], status["failure"]["reason"]) == ("Failed", "BackoffLimitExceeded")


def test_a_job_waits_for_its_turn_and_for_its_model(life: Life) -> None:
    life.obstacle = "another job to end"
    assert life.settle()["phase"] == "Queued"
    life.missing = "a trainer of m, which is not there"
    status = life.settle(startupDeadlineSeconds=60)
    assert (status["phase"], status["waitingFor"]) == ("Pending", life.missing)
    status = life.settle(after_s=61)
    assert (status["phase"], status["failure"]["reason"]) == ("Failed", "StartupDeadlineExceeded")
    assert status["failure"]["message"] == f"after 60 s the job still waits for {life.missing}"


def test_a_driver_whose_trainer_is_away_goes_on_and_is_not_started_anew(life: Life) -> None:
    life.settle()
    life.missing = "a trainer of m, which is not there"
    status = life.settle(startupDeadlineSeconds=60)
    assert (status["phase"], life.is_running) == ("Restarting", True)
    assert life.missing in status["waitingFor"]
    life.end(JobOutcome.NONE)
    life.settle(after_s=30)
    assert not life.is_running
    life.missing = ""
    assert life.settle(after_s=2)["phase"] == "Running"


def test_deadlines(tmp_path: Path) -> None:
    life = Life(tmp_path / "active", {**SPEC, "activeDeadlineSeconds": 30})
    life.settle()
    assert not life.step(after_s=29).delete
    assert life.settle(after_s=1)["failure"]["reason"] == "DeadlineExceeded"
    assert life.step().delete
    life.end(JobOutcome.SAVED)
    assert life.settle(ttlSecondsAfterFinished=10)["phase"] == "Failed"
    assert not life.step(after_s=9).delete_self
    assert life.step(after_s=1).delete_self

    life = Life(tmp_path / "stall", {**SPEC, "stallTimeoutSeconds": 30})
    life.settle()
    life.report = REPORT
    status = life.settle(after_s=36)
    assert "not reported progress for 30 s" in status["waitingFor"]
    (stalled,) = (each for each in status["conditions"] if each["type"] == "Stalled")
    assert stalled["status"] == "True"


def test_a_service_has_no_driver(tmp_path: Path) -> None:
    life = Life(tmp_path, SERVE)
    status = life.settle()
    assert (status["phase"], status["endpoint"]) == ("Running", "here:1")
    assert "assignments" not in status
    assert life.settle(cancel=True)["phase"] == "Cancelled"


def test_a_stored_description_that_breaks_a_rule_fails_the_job(tmp_path: Path) -> None:
    life = Life(tmp_path, {"method": {"type": "sft"}})
    status = life.settle()
    assert (status["phase"], status["failure"]["reason"]) == ("Failed", "InvalidSpec")


def test_a_process_is_stopped_killed_and_read(tmp_path: Path) -> None:
    driver = DriverProcess(tmp_path / "d")
    deaf = "import signal, sys; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); "
    command = [sys.executable, "-c", deaf + "signal.pause()"]
    driver.start("j-driver-0-e1", command, dict(os.environ))
    while "deaf" not in driver.log.read_text():
        assert driver.is_running()
    driver.stop(NOW, 9)
    driver.kill_if_late(NOW + 9)
    assert (driver.pod, driver.is_stopping, driver.is_running()) == ("j-driver-0-e1", True, True)
    driver.kill_if_late(NOW + 10)
    assert ended(driver) == 128 + signal.SIGKILL
    (driver.folder / TERMINATION_LOG).write_text("of the first")
    assert driver.read_end() == ("of the first", "deaf\n")
    driver.start("j-driver-0-e2", [sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
    assert (driver.is_stopping, driver.read_end()[0]) == (False, "")
    assert ended(driver) == 3
    view = observe(driver, None, is_running=False).pods["j-driver-0-e2"]
    assert (view.phase, view.exit_code) == (PodPhase.FAILED, 3)
    driver.delete_pod()
    assert not observe(driver, None, is_running=False).pods


def ended(driver: DriverProcess) -> int | None:
    """Wait for the end of a process; return its exit code."""
    while driver.is_running():
        time.sleep(0.005)
    return driver.exit_code


TEMPLATE = "spec.roles.driver.template"
IN_A_CLUSTER: dict[str, dict[str, Any]] = {
    "env": {
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
    },
    "envFrom": {"envFrom": [{"secretRef": {"name": "s"}}]},
    "volumes": {"volumes": [{"name": "a", "emptyDir": {}}]},
    "initContainers": {"initContainers": [{"name": "a", "image": "i"}]},
}


def with_parameters(**parameters: object) -> dict[str, Any]:
    return {**SPEC, "method": {"type": "supervised", "parameters": parameters}}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({}, "spec.method.type"),
        ({"method": {"type": "supervised"}}, "spec.model"),
        ({**SPEC, "model": {"name": "/m"}}, "spec.model.name"),
        ({**SPEC, "method": {"type": "rl"}}, "spec.roles.sampler"),
        ({**SPEC, "method": {"type": "dpo"}}, "spec.roles.sampler"),
        ({**SPEC, "method": {"type": "custom"}}, "spec.roles.driver.template"),
        ({**SPEC, "poolRef": {"name": "p"}, "roles": {"trainer": {}}}, "spec.poolRef"),
        ({**SPEC, "adapter": {"rank": 129}}, "spec.adapter.rank"),
        ({**SPEC, "checkpoint": {"keepLast": 0}}, "spec.checkpoint.keepLast"),
        ({**SPEC, "checkpoint": {"finalName": "a/b"}}, "spec.checkpoint.finalName"),
        ({**SPEC, "data": {"pvc": "claim/path"}}, "spec.data.pvc"),
        (
            {
                **SPEC,
                "data": {"name": "s3://bucket/train.jsonl"},
                "checkpoint": {"uri": "s3://bucket/a", "secretRef": {"name": "store"}},
            },
            "spec.data.name",
        ),
        ({**SPEC, "roles": {"agents": [{"name": "a", "trainer": {}}]}}, "spec.roles.agents"),
        *[
            ({**SPEC, "roles": {"driver": {"template": template}}}, f"{TEMPLATE}.{field}")
            for field, template in IN_A_CLUSTER.items()
        ],
        (with_parameters(batch_siz=1), "spec.method"),
        (with_parameters(batch_size=0), "spec.method"),
        (
            {
                **SPEC,
                "method": {"type": "custom"},
                "roles": {"driver": {"template": {"image": "i"}}},
            },
            "spec.roles.driver.template.command",
        ),
    ],
)
def test_descriptions_that_are_refused(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as failure:
        check_spec(JobName("p", "j"), spec)
    assert failure.value.metadata["field"] == field
    assert failure.value.message.startswith(field)


def test_one_machine_needs_neither_source_nor_trainer() -> None:
    check_spec(JobName("p", "j"), SPEC)
    check_spec(JobName("p", "j"), {**SPEC, "method": {"type": "rl"}, "roles": {"sampler": {}}})
    job = read_job(Job("projects/p/trainingJobs/j", "u", SPEC, {}, {}, NOW, "1"))
    assert job.created == datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    assert job.status.phase is Phase.PENDING
