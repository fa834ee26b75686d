"""A job whose run lost bit identity says so, once, and goes on."""

from __future__ import annotations

from tests.support.job_life import Life, make_job

from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.plan.observed import Report
from tinsmith_jobs.status_codec import decode_status, encode_status


def test_a_diverged_replay_is_a_condition_that_stays_and_one_warning() -> None:
    life = Life(make_job())
    life.run()
    life.report = Report(3, 100, "projects/p/trainingRuns/r", life.now, has_diverged=True)

    plan = life.step()
    [event] = [event for event in plan.events if event.reason == "OtherBits"]
    assert event.is_warning
    assert "trainingRuns/r" in event.message

    life.report = Report(4, 100, "projects/p/trainingRuns/r", life.now)
    plan = life.step()
    assert not [event for event in plan.events if event.reason == "OtherBits"]
    condition = decode_status(encode_status(plan.status)).condition("ReplayDiverged")
    assert condition is not None
    assert condition.is_true
    assert plan.status.phase is Phase.RUNNING


def test_a_sound_run_has_no_such_condition() -> None:
    life = Life(make_job())
    life.run()
    life.report = Report(3, 100, "r", life.now)

    assert life.step().status.condition("ReplayDiverged") is None
