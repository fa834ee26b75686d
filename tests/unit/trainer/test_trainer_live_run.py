"""The bookkeeping of one run, without engine, ledger or loop."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from tinsmith_engine import AdamParams, Datum, Engine
from tinsmith_runtime.ledger import OperationRecord, OperationState, RunRecord
from tinsmith_trainer.live_run import LiveRun, QueuedOperation
from tinsmith_trainer.work import (
    ForwardWork,
    Kind,
    LoadCheckpointWork,
    OptimStepWork,
    SaveCheckpointWork,
    Work,
)

RUN = "projects/p/trainingRuns/r"
TOKENS = 4
_DATUM = Datum(np.zeros(TOKENS, np.int64), np.zeros(TOKENS, np.int64), {})
_WORK: dict[str, tuple[Kind, Work]] = {
    "f": (Kind.FORWARD, ForwardWork([_DATUM], "cross_entropy", {}, is_backward=False)),
    "b": (Kind.FORWARD_BACKWARD, ForwardWork([_DATUM], "cross_entropy", {}, is_backward=True)),
    "o": (Kind.OPTIM_STEP, OptimStepWork(AdamParams(), 0)),
    "s": (Kind.SAVE_CHECKPOINT, SaveCheckpointWork("c", "training", {})),
    "l": (Kind.LOAD_CHECKPOINT, LoadCheckpointWork("c", include_optimizer=True)),
}


def record(number: int, kind: str = Kind.FORWARD_BACKWARD, **fields: Any) -> OperationRecord:
    values: dict[str, Any] = {
        "run": RUN,
        "sequence_number": number,
        "kind": kind,
        "request_id": None,
        "digest": b"",
        "state": OperationState.PENDING,
        "num_attempts": 0,
        "submit_time_s": 0.0,
    }
    return OperationRecord(**values | fields)


def finished(number: int, revision: int = 0, kind: str = Kind.FORWARD_BACKWARD) -> OperationRecord:
    return record(number, kind, state=OperationState.FAILED, revision=revision)


def make_run(letters: str, first: int = 1) -> LiveRun:
    """Return a run whose queue holds one operation for each letter; `.` is a missing number."""
    run = LiveRun(RunRecord(name=RUN, base_model="m", adapter="{}", epoch=1), cast(Engine, None))
    for number, letter in enumerate(letters, first):
        if letter != ".":
            kind, work = _WORK[letter]
            run.accept(QueuedOperation(record(number, kind), work, 0))
    return run


def finish_slice(run: LiveRun) -> list[int]:
    numbers = [o.sequence_number for o in run.next_slice(max_tokens=100)]
    run.finish(finished(number, run.latest_revision + 1) for number in numbers)
    return numbers


@pytest.mark.parametrize(
    ("letters", "max_tokens", "wanted"),
    [
        ("", 100, []),
        ("b", 100, [1]),
        ("bfbo", 100, [1, 2, 3, 4]),
        ("bobo", 100, [1, 2]),
        ("oo", 100, [1]),
        ("bsb", 100, [1]),
        ("sb", 100, [1]),
        ("lb", 100, [1]),
        ("bl", 100, [1]),
        (".bo", 100, []),
        ("b.o", 100, [1]),
        ("bbbb", 1, [1]),
        ("bbbb", TOKENS, [1]),
        ("bbbb", TOKENS + 1, [1, 2]),
        ("bo", TOKENS, [1]),
        ("bo", TOKENS + 1, [1, 2]),
    ],
)
def test_a_slice_ends_with_a_step_or_before_a_save(
    letters: str, max_tokens: int, wanted: list[int]
) -> None:
    slice_ = make_run(letters).next_slice(max_tokens=max_tokens)
    assert [operation.sequence_number for operation in slice_] == wanted


def test_slices_follow_each_other_to_the_end() -> None:
    run = make_run("bbobosb")
    assert [finish_slice(run) for _ in range(5)] == [[1, 2, 3], [4, 5], [6], [7], []]
    assert (run.next_sequence_number, run.is_idle, run.is_ready) == (8, True, False)


@pytest.mark.parametrize(
    ("letters", "wanted"),
    [
        ("", []),
        ("bo", []),
        ("b.o", []),  # the first can run: nothing is held up yet
        (".o", [1]),
        ("...o", [1, 2, 3]),
        (".b.o", [1, 3]),
    ],
)
def test_missing_numbers_are_those_that_held_operations_wait_for(
    letters: str, wanted: list[int]
) -> None:
    assert make_run(letters).missing_numbers() == wanted


def test_nothing_is_missing_while_something_runs_or_was_refused() -> None:
    run = make_run(".o")
    run.running = frozenset({1})
    assert run.missing_numbers() == []
    run.running = frozenset()
    assert run.missing_numbers() == [1]
    run.consume(finished(1, 1))
    assert (run.missing_numbers(), run.is_ready) == ([], True)


@pytest.mark.parametrize(
    ("letters", "number", "wanted"),
    [
        ("b", 1, "its turn on the engine"),
        ("bbo", 3, "2 operations of this run before it"),
        (".b", 2, "sequence number 1, which has not arrived"),
        (".b.o", 4, "sequence number 1, which has not arrived"),
        ("b", 7, ""),
    ],
)
def test_what_an_operation_waits_for(letters: str, number: int, wanted: str) -> None:
    assert make_run(letters).waiting_for(number) == wanted


def test_what_runs_waits_for_nothing_but_an_obstacle() -> None:
    run = make_run("bo")
    run.running = frozenset({1})
    assert run.waiting_for(1) == ""
    run.obstacle = "space on the disk of the trainer"
    assert run.waiting_for(1) == run.waiting_for(2) == "space on the disk of the trainer"
    assert run.waiting_for(3) == ""


def test_refused_numbers_are_passed_over_and_fail_the_accumulation() -> None:
    run = make_run("b..o")
    run.consume(finished(3, 1, Kind.OPTIM_STEP))
    run.consume(finished(2, 2, Kind.FORWARD_BACKWARD))
    assert (run.next_sequence_number, run.failures) == (1, [])
    assert run.next_free_number == 5
    finish_slice(run)
    assert (run.next_sequence_number, run.failures) == (4, [2])
    assert finish_slice(run) == [4]


def test_a_refusal_of_the_past_changes_nothing() -> None:
    run = make_run("b")
    finish_slice(run)
    run.consume(finished(1, 5))
    assert (run.next_sequence_number, run.failures) == (2, [])


def test_given_up_numbers_may_have_been_gradients() -> None:
    run = make_run("..o")
    run.give_up([1, 2])
    assert (run.next_sequence_number, run.failures, run.is_ready) == (3, [1, 2], True)


def test_a_closed_run_is_never_ready() -> None:
    run = make_run("b")
    assert run.is_ready
    run.is_closed = True
    assert not run.is_ready


def revisions(records: list[OperationRecord] | None) -> list[int] | None:
    return None if records is None else [r.revision for r in records]


def test_recent_results_are_answered_from_memory_only_if_they_are_all_there() -> None:
    run = make_run("")
    assert run.recent_after(0) is None
    for number in range(1, 301):
        run.consume(finished(number, number))
    assert revisions(run.recent_after(298)) == [299, 300]
    assert revisions(run.recent_after(268)) == [*range(269, 301)]
    assert run.recent_after(267) is None  # the oldest have been dropped
    assert run.recent_after(300) is None


def test_a_hole_in_memory_is_not_skipped() -> None:
    run = make_run("")
    run.consume(finished(1, 1))
    run.consume(finished(3, 3))  # revision 2 is a given-up number, in the ledger alone
    assert run.recent_after(0) is None
    assert revisions(run.recent_after(2)) == [3]


async def test_a_change_wakes_everybody_who_waits() -> None:
    run = make_run("b")
    waits = [asyncio.create_task(run.wait_for_change(60)) for _ in range(3)]
    await asyncio.sleep(0)
    run.notify()
    await asyncio.wait_for(asyncio.gather(*waits), 5)
    await run.wait_for_change(0)
