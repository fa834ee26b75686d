"""What an environment says of its episodes, in the metrics of a step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes import rl
from tinsmith.recipes.environment_source import last_info
from tinsmith.recipes.experience import SourceConfig, outcome_metrics
from tinsmith.rollouts.trajectory import TerminationReason, Trajectory, Turn


def play(info: dict[str, Any]) -> Trajectory:
    turns = (Turn(1, "stop"), Turn(1, "stop", info=info))
    return Trajectory((), turns, TerminationReason.DONE)


def test_own_metrics_are_told_from_those_of_the_training() -> None:
    plays = [
        play({"is_success": True, "metrics": {"step": 2, "reward": 0.5}}),
        play({"is_success": False, "metrics": {"step": 4}}),
        play({}),
    ]
    assert outcome_metrics(map(last_info, plays)) == {
        "environment/step": 3.0,
        "environment/reward": 0.5,
        "is_success": 0.5,
    }


def test_what_is_no_finite_number_is_left_out() -> None:
    plays = [
        play({"metrics": {"a": math.nan, "b": "2", "c": [1], "d": 1.0}}),
        play({"metrics": {"a": 1.0, "d": math.inf}}),
        play({"metrics": "none"}),
    ]
    assert outcome_metrics(map(last_info, plays)) == {"environment/a": 1.0, "environment/d": 1.0}


def test_limits_of_an_episode_are_those_of_the_settings() -> None:
    config = SourceConfig(
        num_tasks=1,
        group_size=2,
        temperature=1.0,
        max_tokens=5,
        num_validation=0,
        seed=0,
        max_turns=3,
        max_episode_tokens=9,
        history="split",
    )
    limits = config.rollout_config(100)
    assert (limits.max_turns, limits.max_tokens, limits.max_tokens_per_turn) == (3, 9, 5)
    assert (limits.split_turns, limits.append_only) == (True, False)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"history": "drop"}, "history is 'drop'"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"max_episode_tokens": 0}, "max_episode_tokens is 0"),
    ],
)
def test_settings_that_no_episode_has_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        rl.Config(**settings)
