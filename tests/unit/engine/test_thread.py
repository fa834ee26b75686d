"""The thread that owns an engine: order, fairness, faults, shutdown."""

from __future__ import annotations

import logging
import threading

import pytest

from tinsmith_engine import EngineThread
from tinsmith_runtime.errors import DrainingError


@pytest.fixture
def thread() -> EngineThread:
    return EngineThread()


def test_jobs_run_in_order_on_one_thread_and_errors_reach_the_future(thread: EngineThread) -> None:
    seen: list[int] = []
    futures = [thread.submit(seen.append, index) for index in range(50)]
    failing = thread.submit(int, "no number")
    names = {thread.submit(threading.get_ident).result(5) for _ in range(3)}
    assert [future.result(5) for future in futures] == [None] * 50
    assert seen == list(range(50))
    assert len(names) == 1
    assert threading.get_ident() not in names
    with pytest.raises(ValueError, match="no number"):
        failing.result(5)
    assert thread.close(5)


def test_jobs_that_wait_together_run_together_and_then_there_is_a_step(
    thread: EngineThread,
) -> None:
    events: list[str] = []
    gates = [threading.Event(), threading.Event()]
    thread.submit(gates[0].wait, 5)
    thread.add_stepper(lambda: bool(events.append("step")) or True)
    futures = [thread.submit(events.append, "job") for _ in range(3)]
    futures.append(thread.submit(gates[1].wait, 5))
    gates[0].set()
    futures[2].result(5)
    # These arrive while the ones before are being run: a step comes first.
    futures += [thread.submit(events.append, "late job") for _ in range(2)]
    gates[1].set()
    futures[-1].result(5)
    thread.close(5)
    late = events.index("late job")
    assert "job job job step" in " ".join(events)
    assert events[late - 1] == "step"
    assert events[late + 1] == "late job"


def test_an_idle_stepper_rests_until_woken(thread: EngineThread) -> None:
    calls: list[int] = []
    stepped = threading.Event()

    def step() -> bool:
        calls.append(1)
        stepped.set()
        return False

    thread.add_stepper(step)
    assert stepped.wait(5)
    stepped.clear()
    assert not stepped.wait(0.05)
    thread.wake()
    assert stepped.wait(5)
    thread.close(5)
    assert len(calls) == 2


def test_a_failing_stepper_is_reported_and_the_thread_lives(
    thread: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[Exception] = []
    told = threading.Event()

    def step() -> bool:
        raise RuntimeError("broken")

    def on_error(error: Exception) -> None:
        reported.append(error)
        told.set()
        raise ValueError("so is the owner")

    with caplog.at_level(logging.ERROR):
        thread.add_stepper(step, on_error)
        assert told.wait(5)
        assert thread.submit(int, "3").result(5) == 3
        thread.close(5)
    assert str(reported[0]) == "broken"
    assert "engine stepper failed" in caplog.text


def test_close_finishes_queued_jobs_and_refuses_new_ones(thread: EngineThread) -> None:
    gate = threading.Event()
    thread.submit(gate.wait, 5)
    queued = thread.submit(int, "1")
    threading.Timer(0.05, gate.set).start()
    assert thread.close(5)
    assert queued.result(0) == 1
    with pytest.raises(DrainingError):
        thread.submit(int, "2")


def test_close_gives_up_after_its_timeout(thread: EngineThread) -> None:
    gate = threading.Event()
    thread.submit(gate.wait, 5)
    queued = thread.submit(int, "1")
    assert not thread.close(0.05)
    assert queued.cancelled()
    gate.set()
