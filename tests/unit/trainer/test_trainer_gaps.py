"""How long a number that has not arrived is waited for."""

from __future__ import annotations

from tests.fakes.live_runs import finished, make_run, queued

from tinsmith_trainer.cycle.sequence_gaps import GapTimer

TIMEOUT_S = 60.0


def test_a_run_without_a_gap_waits_for_nothing() -> None:
    run = make_run("bo")
    timer = GapTimer()
    assert not timer.is_overdue(run.queue, 0.0, TIMEOUT_S)
    assert not timer.is_overdue(run.queue, 1000.0, TIMEOUT_S)


def test_a_gap_is_given_up_after_a_time_in_which_nothing_arrived() -> None:
    run = make_run("bo", first=2)
    timer = GapTimer()
    assert [timer.is_overdue(run.queue, now_s, TIMEOUT_S) for now_s in (0.0, 59.0, 60.0)] == [
        False,
        False,
        True,
    ]


def test_each_arrival_shows_that_more_may_come() -> None:
    run = make_run("b", first=2)
    timer = GapTimer()
    assert not timer.is_overdue(run.queue, 0.0, TIMEOUT_S)
    run.queue.accept(queued(3, "b"))
    assert not timer.is_overdue(run.queue, 50.0, TIMEOUT_S)
    assert not timer.is_overdue(run.queue, 109.0, TIMEOUT_S)
    assert timer.is_overdue(run.queue, 110.0, TIMEOUT_S)


def test_a_pod_that_is_behind_with_storing_calls_is_patient() -> None:
    run = make_run("b", first=2)
    timer = GapTimer()
    assert not timer.is_overdue(run.queue, 0.0, TIMEOUT_S)
    assert not timer.is_overdue(run.queue, 70.0, TIMEOUT_S, flooded_s=20.0)
    assert timer.is_overdue(run.queue, 80.0, TIMEOUT_S, flooded_s=20.0)


def test_a_client_that_goes_on_and_on_does_not_hold_a_gap_for_ever() -> None:
    run = make_run("b", first=2)
    timer = GapTimer()
    overdue_s = None
    for now_s in range(0, 1000, 10):
        run.queue.accept(queued(3 + now_s, "b"))
        if timer.is_overdue(run.queue, float(now_s), TIMEOUT_S):
            overdue_s = now_s
            break
    assert overdue_s == 600


def test_a_gap_that_closed_and_opens_again_is_waited_for_anew() -> None:
    run = make_run("b", first=2)
    timer = GapTimer()
    assert not timer.is_overdue(run.queue, 0.0, TIMEOUT_S)
    run.queue.accept(queued(1, "b"))
    assert not timer.is_overdue(run.queue, 59.0, TIMEOUT_S)
    run.queue.accept(queued(5, "b"))
    run.queue.give_up([1, 2])
    run.queue.finish([finished(1), finished(2)])
    assert not timer.is_overdue(run.queue, 100.0, TIMEOUT_S)
    assert not timer.is_overdue(run.queue, 159.0, TIMEOUT_S)
    assert timer.is_overdue(run.queue, 160.0, TIMEOUT_S)
