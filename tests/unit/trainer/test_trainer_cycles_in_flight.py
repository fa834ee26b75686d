"""When a cycle may begin beside others."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith_trainer.cycle.in_flight import CyclesInFlight
from tinsmith_trainer.execution.slices import Slice
from tinsmith_trainer.runs.operations import OptimStepWork


def slices_of(*projects: str, num_attempts: int = 0) -> Sequence[Slice]:
    operation: Any = SimpleNamespace(
        work=OptimStepWork.__new__(OptimStepWork),
        record=SimpleNamespace(num_attempts=num_attempts),
        sequence_number=1,
    )

    def run(project: str) -> Any:
        return SimpleNamespace(project=project, queue=SimpleNamespace(suspect_number=0))

    return [Slice(run(project), [operation]) for project in projects]


@pytest.fixture
def changes() -> list[str]:
    return []


@pytest.fixture
def in_flight(changes: list[str]) -> CyclesInFlight:
    return CyclesInFlight(lambda: changes.append("changed"))


def test_the_first_one_may_begin(in_flight: CyclesInFlight) -> None:
    assert in_flight.let_another_begin
    assert not in_flight


@pytest.mark.parametrize(
    ("left_s", "lets_another_begin"),
    [(None, False), (0.0, False), (0.01, False), (0.2, True), (60.0, True)],
)
def test_another_begins_beside_one_that_has_begun_and_is_long(
    in_flight: CyclesInFlight, left_s: float | None, lets_another_begin: bool
) -> None:
    cycle = in_flight.begin(slices_of("a"))
    if left_s is not None:
        cycle.note_pass(left_s)
    assert in_flight.let_another_begin is lets_another_begin


def test_all_of_them_are_asked(in_flight: CyclesInFlight, changes: list[str]) -> None:
    first, second = in_flight.begin(slices_of("a")), in_flight.begin(slices_of("b"))
    first.note_pass(60.0)
    assert not in_flight.let_another_begin
    second.note_pass(60.0)
    assert in_flight.let_another_begin
    assert len(changes) == 2
    second.note_pass(59.0)
    assert len(changes) == 2, "nothing changed for those that wait"
    first.note_pass(0.01)
    assert not in_flight.let_another_begin
    in_flight.note_end(first)
    assert in_flight.let_another_begin


def test_nothing_begins_beside_what_may_kill_the_process(in_flight: CyclesInFlight) -> None:
    cycle = in_flight.begin(slices_of("a", num_attempts=1))
    cycle.note_pass(60.0)
    assert not in_flight.let_another_begin
    cycle.note_passed()
    assert not in_flight.let_another_begin
    in_flight.note_end(cycle)
    assert in_flight.let_another_begin


def test_a_project_is_in_one_cycle_or_in_two_if_it_is_the_only_one(
    in_flight: CyclesInFlight,
) -> None:
    first = in_flight.begin(slices_of("a", "a", "b"))
    assert in_flight.crowded_projects({"a", "b"}) == {"a", "b"}
    assert in_flight.crowded_projects({"a"}) == frozenset()
    second = in_flight.begin(slices_of("a"))
    assert in_flight.crowded_projects({"a"}) == {"a"}
    first.note_passed()
    second.note_passed()
    assert in_flight.crowded_projects({"a", "b"}) == frozenset(), "steps are short"
