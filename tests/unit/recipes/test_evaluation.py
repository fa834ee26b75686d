"""Figures of an evaluation: means by task, pass@k, reasons of ending, and a picture of several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes import evaluate
from tinsmith.recipes.evaluation.showing import draw, side_by_side
from tinsmith.recipes.evaluation.summaries import Played, summarize, task_of
from tinsmith.rollouts.records import EpisodeRecord, Origin
from tinsmith.rollouts.records.record import PROBLEM, RecordedTurn


def episode(
    reward: float, is_success: bool | None = None, *, reason: str = "done", stop: str = "stop"
) -> EpisodeRecord:
    info = {} if is_success is None else {"is_success": is_success}
    turn = RecordedTurn(num_tokens=1, stop_reason=stop, reward=reward, info=info)
    return EpisodeRecord(
        episode="validation/0/0",
        origin=Origin(environment_seed=0),
        reason=reason,
        turns=(turn,),
        tokens=(5, 6),
        texts=("ask", f"say {reward:g}"),
        mask=(0, 1),
    )


def solved(*plays: bool) -> list[EpisodeRecord]:
    return [episode(float(each), each) for each in plays]


def test_a_task_is_worth_the_mean_of_its_plays() -> None:
    tasks: dict[str, Sequence[EpisodeRecord]] = {
        "a": [episode(1.0), episode(2.0)],
        "b": [episode(0.0), episode(0.0)],
        "c": [episode(4.0)],
    }
    summary = summarize("tiny", Played(tasks), 2, None)
    means = [1.5, 0.0, 4.0]
    assert (summary.num_tasks, summary.num_samples) == (3, 2)
    assert summary.reward == pytest.approx(statistics.fmean(means))
    # The interval is over tasks, of which there are three, not over plays.
    reach = 1.96 * statistics.stdev(means) / 3**0.5
    assert summary.reward_high - summary.reward == pytest.approx(reach)
    assert (summary.is_success, summary.pass_at) == (None, {})


def test_pass_at_k_is_over_tasks_with_enough_plays() -> None:
    tasks = {
        "a": solved(True, False, False, False, False, False),
        "b": solved(False, False, False, False, False, False),
        # Two plays were lost.
        "c": solved(True, True, False, False),
    }
    found = summarize("tiny", Played(tasks), 6, None).pass_at
    assert list(found) == [1, 2, 4, 6]
    assert found[1].mean == pytest.approx((1 / 6 + 0 + 1 / 2) / 3)
    assert found[2].mean == pytest.approx((1 / 3 + 0 + 5 / 6) / 3)
    assert found[6].mean == pytest.approx((1 + 0) / 2)
    assert found[4].low <= found[4].mean <= found[4].high


def test_ends_are_counted_with_what_was_lost() -> None:
    tasks = {
        "a": [episode(0.0), episode(0.0, stop="length"), episode(0.0, reason="max_turns")],
        "b": [episode(0.0, reason="context_full", stop="length"), episode(0.0)],
    }
    summary = summarize("tiny", Played(tasks, {"environment_failed": 3}), 3, None)
    assert summary.ends == {
        "environment_failed": 3,
        "done": 2,
        "length": 1,
        "max_turns": 1,
        "context_full": 1,
    }
    row = summary.to_row({"validation": 0.0})
    assert (row["ends/environment_failed"], row["ends/length"]) == (3, 1)
    assert "ends" not in row


def test_several_are_compared_by_task_and_drawn(tmp_path: Path) -> None:
    first = Played({"a": solved(False, False), "b": solved(True, False), "x": solved(True, True)})
    second = Played({"a": solved(True, False), "b": solved(True, True)})
    summaries = [summarize("one", first, 2, None), summarize("$two", second, 2, first)]
    assert (summaries[1].num_pairs, summaries[1].gain) == (2, pytest.approx(0.5))
    rows = side_by_side({"one": first, "two": second})
    assert [len(row["answers"]) for row in rows] == [2, 2, 1]
    assert rows[0]["answers"]["two"] == [
        {"answer": "say 1", "reward": 1.0},
        {"answer": "say 0", "reward": 0.0},
    ]
    path = draw(tmp_path, "evaluate $", summaries)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    # One alone is compared with nothing.
    assert draw(tmp_path, "evaluate", summaries[:1]) is None
    assert draw(tmp_path, "evaluate", [summarize(name, first, 1, None) for name in "ab"]) == path


def test_plays_of_a_problem_are_of_one_task() -> None:
    def problem(name: str) -> EpisodeRecord:
        return EpisodeRecord(episode=name, origin=Origin(kind=PROBLEM), reason="done")

    assert task_of(problem("3/0")) == task_of(problem("3/1")) != task_of(problem("4/0"))
    assert task_of(episode(0.0)) == "seed 0"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 4}, "greedy plays of a task are alike; add temperature=1"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_cannot_be_played_are_refused(
    settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        evaluate.Config(base_model="tiny", **settings)  # type: ignore[arg-type]
