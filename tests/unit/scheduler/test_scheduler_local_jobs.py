"""What becomes of a job on one machine, decided without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_scheduler.jobs.local_state_machine import Action, Decision, Observed, decide, pause_s
from tinsmith_scheduler.jobs.spec_rules import check_local, check_spec, describe_method
from tinsmith_scheduler.store.records import JobOutcome, JobReport

NOW = 1_800_000_000.0
SPEC: dict[str, Any] = {"model": {"name": "m"}, "method": {"type": "supervised", "maxSteps": 10}}
REPORT = JobReport("j", "u", step=4, max_steps=10, update_time_s=NOW + 5, step_time_s=NOW + 5)
IDLE = Observed()
RUNNING = Observed(is_running=True)
ENDED = Observed(has_ended=True, exit_code=1)


def started(spec: dict[str, Any] = SPEC) -> dict[str, Any]:
    """Return the status of a job whose driver was just started."""
    decision = decide("j", spec, {}, IDLE, NOW)
    assert decision.action is Action.START
    return decision.status


def conditions(decision: Decision) -> dict[str, str]:
    return {each["type"]: each["status"] for each in decision.status["conditions"]}


def test_a_job_is_started_runs_and_succeeds() -> None:
    status = started()
    assert (status["phase"], status["epoch"], status["assignments"][0]["pod"]) == (
        "Starting",
        1,
        "j-driver-0-e1",
    )
    waiting = decide("j", SPEC, status, RUNNING, NOW + 1)
    assert waiting.status["waitingFor"] == "the first report of the driver"
    report = replace(REPORT, metrics={"reward": 0.25}, checkpoint="c", checkpoint_step=4)
    running = decide("j", SPEC, status, replace(RUNNING, report=report), NOW + 6)
    assert (running.status["phase"], running.action) == ("Running", Action.NONE)
    assert conditions(running)["Ready"] == "True"
    progress = running.status["progress"]
    # Four steps took five seconds, six are left.
    assert (progress["summary"], progress["percent"], progress["eta"], progress["reward"]) == (
        "4/10",
        40,
        "8s",
        "0.25",
    )
    done = replace(report, outcome=JobOutcome.SUCCEEDED, step=10)
    ended = replace(ENDED, exit_code=0, report=done)
    decision = decide("j", SPEC, running.status, ended, NOW + 20)
    assert decision.status["phase"] == "Succeeded"
    assert decision.status["checkpoint"]["final"]["name"] == "c"
    assert decision.status["activeSeconds"] == 20
    assert conditions(decision) == {
        "Assigned": "False",
        "Ready": "False",
        "Stalled": "False",
        "Suspended": "False",
        "Complete": "True",
        "Failed": "False",
    }


@pytest.mark.parametrize(
    ("wanted", "going", "gone"),
    [
        ({"suspend": True}, "Suspending", "Suspended"),
        ({"cancel": True}, "Cancelling", "Cancelled"),
        ({"cancel": True, "suspend": True}, "Cancelling", "Cancelled"),
    ],
)
def test_a_driver_is_told_to_save_and_killed_if_it_takes_too_long(
    wanted: dict[str, bool], going: str, gone: str
) -> None:
    spec = {**SPEC, **wanted, "scheduling": {"preemptionGraceSeconds": 9}}
    status = started()
    first = decide("j", spec, status, RUNNING, NOW + 1)
    assert (first.status["phase"], first.action) == (going, Action.STOP)
    told = replace(RUNNING, stop_time_s=NOW + 1)
    assert decide("j", spec, first.status, told, NOW + 9).action is Action.NONE
    assert decide("j", spec, first.status, told, NOW + 11).action is Action.KILL
    saved = replace(REPORT, outcome=JobOutcome.SAVED)
    ended = decide("j", spec, first.status, replace(ENDED, exit_code=143, report=saved), NOW + 12)
    assert (ended.status["phase"], ended.action) == (gone, Action.NONE)


def test_a_suspended_job_goes_on() -> None:
    status = {**started(), "phase": "Suspended", "assignments": [], "activeSeconds": 7}
    status.pop("assignedTime")
    assert decide("j", {**SPEC, "suspend": True}, status, IDLE, NOW).status["phase"] == "Suspended"
    decision = decide("j", SPEC, status, IDLE, NOW + 60)
    assert (decision.action, decision.status["epoch"]) == (Action.START, 2)


def test_failures_are_restarted_with_a_pause_until_they_are_too_many() -> None:
    spec = {**SPEC, "backoffLimit": 1}
    failed = decide("j", spec, started(), replace(ENDED, exit_code=137), NOW + 5)
    assert (failed.status["phase"], failed.status["restartCount"]) == ("Restarting", 1)
    assert failed.status["failure"] == {
        "reason": "DriverFailed",
        "message": "the driver ended with exit code 137; its log says why",
        "role": "driver",
        "exitCode": 137,
    }
    pausing = decide("j", spec, failed.status, IDLE, NOW + 5.5)
    assert (pausing.action, pausing.status["waitingFor"]) == (
        Action.NONE,
        "the pause before restart 1",
    )
    again = decide("j", spec, pausing.status, IDLE, NOW + 6.5)
    assert again.action is Action.START
    over = decide("j", spec, again.status, replace(ENDED, exit_code=None), NOW + 9)
    assert over.status["phase"] == "Failed"
    assert over.status["failure"]["reason"] == "BackoffLimitExceeded"
    assert conditions(over)["Failed"] == "True"
    assert [pause_s(count) for count in (1, 2, 3, 9)] == [1.0, 2.0, 4.0, 60.0]


@pytest.mark.parametrize(
    ("report", "exit_code", "message"),
    [
        (
            replace(REPORT, outcome=JobOutcome.FAILED, message="no such data"),
            1,
            "no such data",
        ),
        (None, 2, "the driver ended with exit code 2; its log says why"),
    ],
)
def test_what_can_not_get_better_is_not_restarted(
    report: JobReport | None, exit_code: int, message: str
) -> None:
    seen = replace(ENDED, exit_code=exit_code, report=report)
    decision = decide("j", SPEC, started(), seen, NOW + 6)
    assert (decision.status["phase"], decision.status["failure"]["message"]) == ("Failed", message)


def test_what_an_earlier_part_said_is_not_taken_for_this_ones() -> None:
    early = replace(REPORT, update_time_s=NOW - 5, outcome=JobOutcome.SAVED)
    decision = decide("j", SPEC, started(), replace(ENDED, report=early), NOW + 1)
    assert decision.status["restartCount"] == 1
    late = replace(early, update_time_s=NOW + 1)
    decision = decide("j", SPEC, started(), replace(ENDED, report=late), NOW + 2)
    assert (decision.status["phase"], decision.status.get("restartCount")) == ("Queued", None)


def test_deadlines() -> None:
    spec = {**SPEC, "activeDeadlineSeconds": 30}
    over = decide("j", spec, started(spec), RUNNING, NOW + 31)
    assert (over.action, over.status["phase"]) == (Action.STOP, "Cancelling")
    ended = decide("j", spec, over.status, replace(ENDED, exit_code=143), NOW + 32)
    assert ended.status["phase"] == "Failed"
    assert ended.status["failure"]["reason"] == "DeadlineExceeded"

    spec = {**SPEC, "startupDeadlineSeconds": 60}
    absent = replace(IDLE, model_problem="a trainer of m")
    first = decide("j", spec, {}, absent, NOW)
    assert (first.status["phase"], first.status["waitingFor"]) == ("Pending", "a trainer of m")
    late = decide("j", spec, first.status, absent, NOW + 61)
    assert late.status["failure"]["message"] == (
        "after 60 s the job still waited for a trainer of m"
    )

    spec = {**SPEC, "stallTimeoutSeconds": 30}
    silent = decide("j", spec, started(spec), replace(RUNNING, report=REPORT), NOW + 36)
    assert silent.status["waitingFor"] == "a report of the driver, which said nothing for 31 s"
    assert conditions(silent)["Stalled"] == "True"

    spec = {**SPEC, "ttlSecondsAfterFinished": 10}
    done = {"phase": "Failed", "completionTime": "2027-01-15T08:00:00.000Z"}
    assert decide("j", spec, done, IDLE, NOW + 9).action is Action.NONE
    assert decide("j", spec, done, IDLE, NOW + 11).action is Action.FORGET


def test_a_status_that_does_not_change_is_the_same() -> None:
    status = decide("j", SPEC, started(), replace(RUNNING, report=REPORT), NOW + 6).status
    again = decide("j", SPEC, status, replace(RUNNING, report=REPORT), NOW + 7)
    assert again == Decision(status, Action.NONE)


def test_a_service_has_no_driver() -> None:
    spec = {"model": {"name": "m"}, "method": {"type": "serve"}, "roles": {"sampler": {}}}
    decision = decide("j", spec, {}, replace(IDLE, endpoint="here:1"), NOW)
    assert (decision.action, decision.status["phase"]) == (Action.NONE, "Running")
    assert decision.status["endpoint"] == "here:1"
    ended = decide("j", {**spec, "cancel": True}, decision.status, IDLE, NOW)
    assert ended.status["phase"] == "Cancelled"


def with_parameters(**parameters: object) -> dict[str, Any]:
    return {**SPEC, "method": {"type": "supervised", "parameters": parameters}}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({}, "spec.method.type"),
        ({"method": {"type": "supervised"}}, "spec.model"),
        ({**SPEC, "model": {"name": "/m"}}, "spec.model.name"),
        ({**SPEC, "method": {"type": "rl"}}, "spec.roles.sampler"),
        ({**SPEC, "method": {"type": "custom"}}, "spec.roles.driver.template"),
        ({**SPEC, "poolRef": {"name": "p"}, "roles": {"trainer": {}}}, "spec.poolRef"),
        ({**SPEC, "adapter": {"rank": 129}}, "spec.adapter.rank"),
        ({**SPEC, "checkpoint": {"keepLast": 0}}, "spec.checkpoint.keepLast"),
        ({**SPEC, "checkpoint": {"finalName": "a/b"}}, "spec.checkpoint.finalName"),
        ({**SPEC, "data": {"pvc": "claim/path"}}, "spec.data.pvc"),
        (with_parameters(batch_siz=1), "spec.method"),
        (
            {**SPEC, "method": {"type": "supervised", "parameters": {"batch_size": 0}}},
            "spec.method",
        ),
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
    def check() -> None:
        check_spec(spec)
        check_local(spec)

    with pytest.raises(InvalidFieldError) as failure:
        check()
    assert failure.value.metadata["field"] == field


def test_the_driver_is_told_what_the_job_says() -> None:
    spec = {**SPEC, "checkpoint": {"everySteps": 3, "uri": "s3://x/y"}, "data": {"name": "d"}}
    assert describe_method(spec, "m") == (
        '{"adapter": {}, "checkpoint": {"everySteps": 3}, "data": "d", "maxSteps": 10, '
        '"model": "m", "type": "supervised"}'
    )
