"""Long jobs on the engine's thread: their parts take turns with other jobs and with steppers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tinsmith_engine import EngineThread, Parts, timed


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    thread = EngineThread()
    yield thread
    thread.close(60)


def parts_of(name: str, num_parts: int, events: list[str]) -> Parts[str]:
    for number in range(num_parts):
        yield float(num_parts - number - 1)
        events.append(f"{name}{number}")
    return f"{name} ended"


def test_parts_of_long_jobs_take_turns_and_short_jobs_wait_for_one_part(
    thread: EngineThread,
) -> None:
    events: list[str] = []
    gate = threading.Event()
    thread.submit(gate.wait, 5)
    long = thread.submit_parts(parts_of("a", 3, events))
    other = thread.submit_parts(parts_of("b", 2, events))

    def send_short(left_s: float) -> None:
        if left_s == 1.0:
            thread.submit(events.append, "short")

    last = thread.submit_parts(parts_of("c", 2, events), send_short)
    gate.set()
    assert [each.result(60) for each in (long, other, last)] == [
        "a ended",
        "b ended",
        "c ended",
    ]
    assert events == ["a0", "b0", "c0", "short", "a1", "b1", "c1", "a2"]


def test_a_stepper_steps_between_parts(thread: EngineThread) -> None:
    events: list[str] = []

    def step() -> bool:
        events.append("step")
        return True

    thread.add_stepper(step)
    assert thread.submit_parts(parts_of("a", 3, events)).result(60) == "a ended"
    within = events[events.index("a0") : events.index("a2") + 1]
    assert [each for each in within if each != "step"] == ["a0", "a1", "a2"]
    assert within.count("step") == 2


def test_each_part_says_what_is_left_and_is_told_whether_the_thread_is_shared(
    thread: EngineThread,
) -> None:
    def asking(heard: list[bool | None]) -> Parts[None]:
        for left_s in (2.0, 1.0, 0.0):
            heard.append((yield left_s))

    told: list[float] = []
    alone: list[bool | None] = []
    thread.submit_parts(asking(alone), told.append).result(60)
    assert told == [2.0, 1.0, 0.0]
    assert alone == [False, False, False]
    beside: list[bool | None] = []
    gate = threading.Event()
    thread.submit(gate.wait, 5)
    last = thread.submit_parts(asking(beside))
    thread.submit_parts(parts_of("a", 1, []))
    gate.set()
    last.result(60)
    # The other one is over soon, but where one was there are more.
    assert beside == [True, True, True]


def test_the_time_of_parts_is_without_what_comes_between_them(thread: EngineThread) -> None:
    now_s = 100.0

    def pass_time(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def slow() -> Parts[str]:
        for left_s in (1.0, 0.0):
            yield left_s
            pass_time(0.25)
        return "slow"

    def long_between(_: float) -> None:
        thread.submit(pass_time, 8.0)

    parts = timed(slow(), clock=lambda: now_s)
    assert thread.submit_parts(parts, long_between).result(60) == ("slow", 0.5)
    assert now_s > 108


def test_an_error_of_a_part_ends_its_job_alone(thread: EngineThread) -> None:
    def failing() -> Parts[None]:
        yield 1.0
        raise ValueError("in a part")

    broken = thread.submit_parts(failing())
    sound = thread.submit_parts(parts_of("a", 2, []))
    with pytest.raises(ValueError, match="in a part"):
        broken.result(60)
    assert sound.result(60) == "a ended"


def test_a_job_without_parts_has_a_result(thread: EngineThread) -> None:
    assert thread.submit_parts(parts_of("a", 0, [])).result(60) == "a ended"


def test_closing_ends_long_jobs_that_have_begun() -> None:
    thread = EngineThread()
    events: list[str] = []
    long = thread.submit_parts(parts_of("a", 50, events))
    assert thread.close(60)
    assert long.result(0) == "a ended"
    assert len(events) == 50
