"""What of a run may go into one cycle, and what stays together."""

from __future__ import annotations

import pytest
from tests.fakes.live_runs import TOKENS, finished, make_run, queued

from tinsmith_trainer.execution.slices import (
    FIXED_COST,
    Slice,
    backlog_of,
    cut,
    next_parts,
    step_behind,
)

STEP = TOKENS + FIXED_COST


@pytest.mark.parametrize(
    ("letters", "max_cost", "wanted"),
    [
        pytest.param("", 1000, [], id="nothing"),
        pytest.param("bfb", 1000, [[1], [2], [3]], id="each-batch-is-a-part"),
        pytest.param("bbo", 1000, [[1], [2, 3]], id="a-step-stays-with-its-gradient"),
        pytest.param("bobo", 1000, [[1, 2]], id="one-boundary"),
        pytest.param("oo", 1000, [[1]], id="a-step-alone"),
        pytest.param("bsb", 1000, [[1]], id="ends-before-a-save"),
        pytest.param("sb", 1000, [[1]], id="a-save-is-a-slice"),
        pytest.param("lo", 1000, [[1]], id="a-load-is-a-slice"),
        pytest.param(".bo", 1000, [], id="held"),
        pytest.param("b.o", 1000, [[1]], id="ends-before-a-gap"),
        pytest.param("bbbb", TOKENS + 1, [[1], [2]], id="no-more-than-can-be-used"),
        pytest.param("Bbo", 1000, [[1]], id="a-suspect-is-alone"),
        pytest.param("bbBo", 1000, [[1], [2]], id="ends-before-a-suspect"),
        pytest.param("bO", 1000, [[1]], id="a-suspect-step-does-not-join"),
        pytest.param("Sb", 1000, [[1]], id="a-save-begun-before"),
    ],
)
def test_parts(letters: str, max_cost: int, wanted: list[list[int]]) -> None:
    parts = next_parts(make_run(letters), max_cost=max_cost)
    assert [[o.sequence_number for o in part.operations] for part in parts] == wanted


@pytest.mark.parametrize(
    ("letters", "costs", "is_alone"),
    [
        ("bf", [TOKENS, TOKENS], False),
        ("bbo", [TOKENS, STEP], False),
        ("o", [FIXED_COST], False),
        ("s", [FIXED_COST], False),
        ("B", [TOKENS], True),
        ("S", [FIXED_COST], False),  # it shares no engine call
    ],
)
def test_what_the_fair_queue_is_told(letters: str, costs: list[int], is_alone: bool) -> None:
    run = make_run(letters)
    backlog = backlog_of(run, next_parts(run, max_cost=1000))
    assert (list(backlog.costs), backlog.is_alone, backlog.project) == (costs, is_alone, "p")


def test_operations_of_a_cycle_that_broke_are_suspect() -> None:
    run = make_run("bbbb")
    run.queue.start([1, 2])
    run.queue.suspect_running()
    run.queue.stop()
    assert len(next_parts(run, max_cost=1000)) == 1
    assert backlog_of(run, next_parts(run, max_cost=1000)).is_alone
    run.queue.finish([finished(1, 1), finished(2, 2)])
    assert len(next_parts(run, max_cost=1000)) == 2


def test_a_slice_is_the_parts_that_got_a_turn() -> None:
    run = make_run("bbbo")
    parts = next_parts(run, max_cost=1000)
    assert [o.sequence_number for o in cut(run, parts, 2).operations] == [1, 2]
    assert [o.sequence_number for o in cut(run, parts, 3).operations] == [1, 2, 3, 4]
    assert cut(run, parts, 1).is_computed
    save = make_run("s")
    assert not Slice(save, [save.queue[1]]).is_computed


@pytest.mark.parametrize(
    ("letters", "joins"), [("bo", True), ("fo", True), ("bb", False), ("b", False), ("bO", False)]
)
def test_a_step_joins_the_gradient_before_it(letters: str, joins: bool) -> None:
    run = make_run(letters)
    assert (step_behind(run, run.queue[1]) is not None) == joins


def test_a_step_does_not_join_a_step() -> None:
    run = make_run("oo")
    assert step_behind(run, queued(1, "o")) is None
