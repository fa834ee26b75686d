"""What people are told of an operation that is not done."""

from __future__ import annotations

import pytest
from tests.fakes.live_runs import TOKENS, make_run

from tinsmith_trainer.execution.operation_status import OperationStatus, status_of
from tinsmith_trainer.runs.run import LiveRun


def status(run: LiveRun, number: int, *others: LiveRun) -> OperationStatus:
    return status_of(run, number, [run, *others], cycle_tokens=1000)


@pytest.mark.parametrize(
    ("letters", "number", "position", "wanted"),
    [
        ("b", 1, 0, "its turn on the engine"),
        ("bo", 2, 1, "1 operation of this run before it"),
        ("bbo", 3, 2, "2 operations of this run before it"),
        (".b", 2, 0, "sequence number 1, which has not arrived"),
        (".b.o", 4, 1, "sequence number 1, which has not arrived"),
        ("b", 7, 0, ""),
    ],
)
def test_what_an_operation_waits_for_in_its_run(
    letters: str, number: int, position: int, wanted: str
) -> None:
    found = status(make_run(letters), number)
    assert (found.position, found.waiting_for) == (position, wanted)
    assert found.is_held == ("arrived" in wanted)


def test_what_runs_has_no_position_and_waits_for_nothing_but_an_obstacle() -> None:
    run = make_run("bob")
    run.queue.start([1, 2])
    assert status(run, 2) == OperationStatus(is_running=True)
    assert status(run, 3).position == 2
    run.block("space on the disk of the trainer")
    for number in (1, 3):
        assert status(run, number).waiting_for == "space on the disk of the trainer"
    assert status(run, 4) == OperationStatus()


def test_the_turn_counts_other_runs_and_their_tokens() -> None:
    run = make_run("bb")
    busy = make_run("bb", name="projects/q/trainingRuns/busy")
    busy.queue.start([1])
    ready = make_run("bbobb", name="projects/q/trainingRuns/ready")
    held = make_run(".b", name="projects/q/trainingRuns/held")
    elsewhere = make_run("b", name="projects/q/trainingRuns/elsewhere", engine=object())
    others = (busy, ready, held, elsewhere)
    # One batch runs, and the ready run has two before its step.
    assert status(run, 1, *others).waiting_for == (
        "its turn on the engine: 2 runs and about 12 tokens before it"
    )
    assert status(run, 1, *others).num_tokens_ahead == 3 * TOKENS
    second = status(run, 2, *others)
    assert second.waiting_for == "1 operation of this run before it"
    assert second.num_tokens_ahead == 4 * TOKENS
