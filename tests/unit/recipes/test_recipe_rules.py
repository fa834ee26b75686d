"""Settings that nothing can be trained with, and steps that train nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import pytest

from tinsmith.cli.recipe_settings import settings_of
from tinsmith.errors import ConfigurationError
from tinsmith.recipes import rl, rl_episodes, supervised
from tinsmith.recipes.experiment.health import Health


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        pytest.param(supervised, {"batch_size": 0}, "batch_size is 0; give a whole", id="batch"),
        pytest.param(supervised, {"adapter": "qlora"}, "'qlora'; give one of lora, full", id="ad"),
        pytest.param(supervised, {"learning_rate": -1.0}, "learning_rate is -1.0", id="rate"),
        pytest.param(supervised, {"learning_rate": float("nan")}, "learning_rate is nan", id="nan"),
        pytest.param(supervised, {"learning_rate": 1e10}, "above 0 and at most 1", id="huge"),
        pytest.param(supervised, {"grad_clip_norm": -1.0}, "grad_clip_norm is -1.0", id="clip"),
        pytest.param(supervised, {"num_steps": 0}, "num_steps is 0", id="steps"),
        pytest.param(supervised, {"rank": 100_000}, "rank is 100000.* from 1 to 128", id="rank"),
        pytest.param(supervised, {"checkpoint": "a/b"}, "checkpoint is 'a/b'", id="checkpoint"),
        pytest.param(rl, {"group_size": 1}, "group_size is 1.* 2 or more", id="group"),
        pytest.param(rl, {"loss": "dpo"}, "loss is 'dpo'.*importance_sampling, ppo", id="loss"),
        pytest.param(rl, {"temperature": 0.0}, "temperature is 0.0", id="temperature"),
        pytest.param(rl_episodes, {"group_size": 1}, "group_size is 1", id="episodes-group"),
        pytest.param(rl_episodes, {"loss": "dpo"}, "loss is 'dpo'", id="episodes-loss"),
        pytest.param(rl_episodes, {"step_timeout_s": 0.0}, "step_timeout_s is 0.0", id="timeout"),
    ],
)
def test_a_setting_out_of_its_range_is_refused_by_its_name(
    recipe: ModuleType, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        recipe.Config(**settings)


def test_steps_without_anything_to_learn_from_are_told_once() -> None:
    said: list[str] = []
    health = Health(said.append)
    for num_sequences in (0, 0, 8, 0, 0):
        health.note_trained(num_sequences)
    assert not said
    for _ in range(5):
        health.note_trained(0)
    assert len(said) == 1
    assert "nothing is learned; raise temperature or group_size" in said[0]


def test_gradients_that_are_zero_or_not_finite_are_told_once() -> None:
    said: list[str] = []
    health = Health(said.append)
    for norm in (0.0, 1.0, 0.0, 0.0):
        health.note_gradient(norm)
    assert not said
    health.note_gradient(0.0)
    assert "the gradient of the last 3 steps is 0" in said[0]
    health.note_gradient(float("nan"))
    health.note_gradient(float("inf"))
    assert len(said) == 2
    assert said[1].startswith("warning: the gradient is not finite")


def test_a_kl_that_stays_high_is_told_once() -> None:
    said: list[str] = []
    health = Health(said.append)
    for kl in (0.02, -0.02, 0.0, 0.02, 0.02):
        health.note_kl(kl)
    assert not said
    for _ in range(3):
        health.note_kl(0.02)
    assert len(said) == 1
    assert "above 0.01 in the last 3 steps" in said[0]


def test_a_recipe_of_your_own_shows_the_settings_that_it_inherits() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Same(supervised.Config):
        """Sets nothing itself."""

    @dataclass(frozen=True, kw_only=True)
    class Own(supervised.Config):
        rank: int = 4
        extra: str = ""

    assert {each.name for each in settings_of(Same)} == {f.name for f in fields(supervised.Config)}
    assert [each.name for each in settings_of(Own)][:2] == ["rank", "extra"]
