"""A job that failed begins anew: by itself, at its author's wish, or not at all."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import pytest
from tests.support.job_life import NOW, Life, make_job

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.plan.observed import Observed, PodPhase, Report
from tinsmith_jobs.plan.retry_policy import advice, is_corrected, is_retried
from tinsmith_jobs.status import Assignment, Failure, Saved, Status

LATER = NOW + datetime.timedelta(seconds=1)
POD = Assignment("math-driver-0-e1", "driver", 0, "", 0, 1)
NOT_STARTED: dict[str, Any] = {
    "phase": Phase.FAILED,
    "failure": Failure(conditions.INVALID_SPEC, "64GB"),
    "completion_time": NOW,
    "observed_generation": 1,
}
STARTED = {**NOT_STARTED, "start_time": NOW, "failure": Failure(conditions.POD_FAILED, "lost")}


@pytest.mark.parametrize(
    ("status", "generation", "retried_end", "corrected", "retried", "is_told"),
    [
        pytest.param(NOT_STARTED, 1, None, False, False, False, id="nothing-changed"),
        pytest.param(NOT_STARTED, 2, None, True, False, True, id="corrected"),
        pytest.param(STARTED, 2, None, False, False, True, id="changed-after-the-start"),
        pytest.param(STARTED, 1, NOW, False, True, False, id="asked-for"),
        pytest.param(STARTED, 1, LATER, False, False, False, id="another-end"),
        pytest.param(
            {**STARTED, "assignments": (POD,)}, 1, NOW, False, False, False, id="still-ends"
        ),
        pytest.param(
            {**STARTED, "phase": Phase.SUCCEEDED}, 2, NOW, False, False, False, id="succeeded"
        ),
    ],
)
def test_which_failed_jobs_begin_anew(
    status: dict[str, Any],
    generation: int,
    retried_end: datetime.datetime | None,
    corrected: bool,
    retried: bool,
    is_told: bool,
) -> None:
    job = replace(
        make_job(), status=Status(**status), generation=generation, retried_end=retried_end
    )

    assert is_corrected(job, Observed()) is corrected
    assert is_retried(job) is retried
    assert ("tinsmith jobs retry math" in advice(job)) is is_told


def failed() -> Life:
    """Return a job that failed for good at step 40, and gave all back."""
    life = Life(make_job(backoffLimit=0))
    life.run()
    life.report = Report(
        40, 100, "projects/p/trainingRuns/r", life.now, {}, Saved("c/40", 40), has_failed=True
    )
    life.fail("driver", 1, "no space left")
    for _ in range(3):
        life.step()
        life.remove_deleted()
    assert life.job.status.phase is Phase.FAILED
    assert not life.job.status.assignments
    return life


def retry(life: Life) -> None:
    life.now += datetime.timedelta(seconds=60)
    life.job = replace(life.job, retried_end=life.job.status.completion_time)


def test_a_job_that_is_tried_again_goes_on_from_its_save_with_new_names() -> None:
    life = failed()
    logs = set(life.pods)
    assert logs
    retry(life)

    plan = life.step()
    life.remove_deleted()

    assert {deletion.name for deletion in plan.delete} == logs
    assert [event.reason for event in plan.events] == [conditions.RETRIED]
    status = life.run()
    assert status.phase is Phase.RUNNING
    assert status.latest == Saved("c/40", 40)
    assert (status.failure, status.restart_count, status.completion_time) == (None, 0, None)
    assert not logs & set(life.pods)


def test_a_retry_that_is_not_possible_yet_is_told_until_everything_was_given_back() -> None:
    life = Life(make_job(backoffLimit=0))
    life.run()
    life.fail("driver", 1, "no space left")
    life.step()
    assert life.job.status.phase is Phase.FAILED
    assert life.job.status.assignments
    retry(life)

    status = life.step().status

    assert status.phase is Phase.FAILED
    assert status.waiting_for.startswith("begins anew once everything was given back; ")
    life.remove_deleted()
    assert life.run().phase is Phase.RUNNING


def test_what_the_driver_reported_before_does_not_end_the_next_attempt() -> None:
    life = failed()
    life.change(backoff_limit=1)
    retry(life)
    life.run()

    life.fail("driver", 137, "killed before it could report")

    assert life.step().status.phase is Phase.RESTARTING


def test_a_retry_undoes_one_failure_alone() -> None:
    life = failed()
    retry(life)
    life.run()
    life.fail("driver", 1, "no space left")
    for _ in range(4):
        life.step()
        life.remove_deleted()

    assert life.job.status.phase is Phase.FAILED


def test_a_retry_of_a_job_that_still_cannot_be_run_fails_with_the_reason() -> None:
    life = failed()
    retry(life)
    life.job = replace(life.job, spec=None, spec_error="spec.gpu: unknown", generation=2)

    life.step()
    plan = life.step()

    assert plan.status.phase is Phase.FAILED
    assert plan.status.failure is not None
    assert "spec.gpu" in plan.status.failure.message
    assert plan.status.observed_generation == 2
    assert PodPhase.FAILED not in {pod.phase for pod in life.pods.values() if not pod.is_deleting}
