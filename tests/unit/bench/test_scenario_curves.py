"""Curves of scenarios: the gain, its bound, and what is drawn, of runs whose figures are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.scenario_figure import draw_figure, num_imitated, points_of, policies_of
from bench.scenarios import gains_of


def run(seed: int, start: list[float], end: list[float]) -> list[dict[str, Any]]:
    """Return a run of two imitated steps and four that were rewarded."""
    rewards = {"before": [[-1.0] * len(start)], "warm_start": [start], "after": [end]}
    head = {"scenario": "sums", "seed": seed, "minutes": 1.0, "rewards": rewards}
    imitated = [{"seed": seed, "step": step, "imitation_loss": 1.0} for step in range(2)]
    imitated[1]["validation"] = sum(start) / len(start)
    played = [{"seed": seed, "step": step, "reward": 0.5} for step in range(2, 6)]
    return [head, *imitated, *played]


def test_a_gain_is_paired_by_task_and_averaged_over_seeds() -> None:
    curves = [run(0, [0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0]), run(1, [0.0] * 4, [1.0] * 4)]
    [gain] = gains_of(curves)
    assert gain.policy == ""
    assert gain.by_seed == (0.25, 1.0)
    assert gain.mean == 0.625
    # Differences by task are 1, 0.5, 0.5 and 0.5: their deviation is a quarter.
    assert gain.lower_95 == pytest.approx(0.625 - 1.96 * 0.25 / 2)


def test_a_curve_begins_before_the_warm_start_and_ends_with_the_run() -> None:
    curve = run(0, [0.0, 0.5], [1.0, 0.5])
    assert points_of(curve, "", 0) == [(0, -1.0), (2, 0.25), (6, 0.75)]
    assert num_imitated(curve) == 2


def test_figures_of_one_and_of_two_policies_are_drawn(tmp_path: Path) -> None:
    one = [run(seed, [0.0, 0.5], [1.0, 0.5]) for seed in range(3)]
    two = [_twice(curve) for curve in one]
    assert policies_of(one) == [""]
    assert policies_of(two) == ["black", "white"]
    assert [gain.policy for gain in gains_of(two)] == ["black", "white"]
    draw_figure(tmp_path / "new" / "curves.png", {"one": one, "two": two})
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")


def _twice(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a run as one of two policies that earn the same."""
    head = {**curve[0], "rewards": {part: 2 * each for part, each in curve[0]["rewards"].items()}}
    shared = ("seed", "step")
    rows = [
        {
            **{key: row[key] for key in shared},
            **{
                f"{policy}/{key}": value
                for policy in ("black", "white")
                for key, value in row.items()
                if key not in shared
            },
        }
        for row in curve[1:]
    ]
    # The moving mean of the figure needs some steps.
    more = [{"seed": 0, "step": step, "black/reward": 1.0, "white/reward": -1.0} for step in (6, 7)]
    return [head, *rows, *more]
