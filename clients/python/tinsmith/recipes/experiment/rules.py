"""What the settings of recipes may be, by name: checked before anything is asked of a server.

A setting has one meaning and one range in every recipe that has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tinsmith.errors import ConfigurationError
from tinsmith.names import is_valid_id
from tinsmith.recipes.experiment.trackers import check_trackers
from tinsmith.recipes.tasks.conversations import TRAIN_ON
from tinsmith.recipes.tasks.lengths import TOO_LONG

LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
"""Losses that take what recipes of reinforcement learning send: log-probabilities, advantages."""

_MAX_RANK = 128


@dataclass(frozen=True, slots=True)
class _Rule:
    holds: Callable[[Any], bool]
    wanted: str


def _at_least(least: int) -> _Rule:
    return _Rule(lambda value: value >= least, f"a whole number, {least} or more")


def _one_of(*words: str) -> _Rule:
    return _Rule(lambda value: value in words, f"one of {', '.join(words)}")


_RULES: Mapping[str, _Rule] = {
    "adapter": _one_of("lora", "full"),
    "train_on": _one_of(*TRAIN_ON),
    "too_long": _one_of(*TOO_LONG),
    "loss": _one_of(*LOSSES),
    "rollouts": _one_of("client", "server"),
    "keep_rollouts": _Rule(
        lambda value: value in ("", "jsonl", "parquet"), "jsonl or parquet, or leave it out"
    ),
    "rank": _Rule(lambda value: 1 <= value <= _MAX_RANK, f"a whole number from 1 to {_MAX_RANK}"),
    # Adam moves each weight by about the rate: above 1 nothing is left of a model in one step.
    "learning_rate": _Rule(
        lambda value: value is None or 0 < value <= 1, "a number above 0 and at most 1"
    ),
    "learning_rate_floor": _Rule(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "grad_clip_norm": _Rule(
        lambda value: value >= 0 and math.isfinite(value), "a number, 0 or more; 0 clips nothing"
    ),
    "temperature": _Rule(
        lambda value: value > 0 and math.isfinite(value),
        "a number above 0: plays that are all alike teach nothing",
    ),
    "beta": _Rule(lambda value: 0 < value < math.inf, "a number above 0"),
    "imitation_learning_rate": _Rule(
        lambda value: 0 < value <= 1, "a number above 0 and at most 1"
    ),
    "kl_coef": _Rule(lambda value: 0 < value < math.inf, "a number above 0"),
    "kl_discount_factor": _Rule(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "format_coef": _Rule(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "league_share": _Rule(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "baseline_decay": _Rule(lambda value: 0 <= value < 1, "a number from 0 up to, and without, 1"),
    "turn_timeout_s": _Rule(lambda value: value > 0, "a number of seconds above 0"),
    "step_timeout_s": _Rule(lambda value: value > 0, "a number of seconds above 0"),
    # The advantage of a play is what it earned above its group: alone it has none.
    "group_size": _at_least(2),
    "num_steps": _at_least(1),
    "batch_size": _at_least(1),
    "num_games": _at_least(1),
    "snapshot_every": _at_least(1),
    "max_snapshots": _at_least(1),
    "num_imitation_steps": _at_least(0),
    "num_practice_steps": _at_least(0),
    "num_problems": _at_least(1),
    "num_demonstrations": _at_least(1),
    "num_tasks": _at_least(1),
    "num_prompts": _at_least(1),
    "num_samples": _at_least(1),
    "max_tokens": _at_least(1),
    "max_turns": _at_least(1),
    "max_episode_tokens": _at_least(1),
    "history": _one_of("refuse", "split", "append"),
    "num_validation": _at_least(0),
    "num_warmup_steps": _at_least(0),
    "save_every": _at_least(0),
    "eval_every": _at_least(0),
    "rare_eval_every": _at_least(0),
    "evaluator_timeout_s": _Rule(lambda value: value > 0, "a number of seconds above 0"),
    "seed": _at_least(0),
    "checkpoint": _Rule(is_valid_id, "an id: up to 63 letters, digits, '-', '_' and '.'"),
}


_MEANINGS: Mapping[str, str] = {
    "base_model": "What is trained: a name of `tinsmith models list`.",
    "begin_from": "A checkpoint to begin from, `run-1/final`; the base model if it is empty.",
    "board_size": "Rows and columns of gomoku's board.",
    "row_length": "Stones in a row that win.",
    "numbered_cells": "Whether gomoku's free cells show a number, which is the move, instead of "
    "`row,column`.",
    "environment_config": "Settings of the environment, as a JSON object.",
    "rank": "Of the adapter.",
    "train_unembed": "Whether an adapter adapts the unembedding as well.",
    "learning_rate": "Its peak.",
    "num_warmup_steps": "Steps in which the learning rate rises to its peak.",
    "learning_rate_floor": "Share of the peak below which the learning rate does not fall.",
    "grad_clip_norm": "Norm that a gradient is clipped to.",
    "num_steps": "Steps in all, each with one update of the weights.",
    "imitation_learning_rate": "Peak of the learning rate in the steps of the warm start.",
    "batch_size": "Rows of a step.",
    "num_games": "Games of a step.",
    "temperature": "Of what is sampled to be trained on.",
    "max_turns": "Turns of an episode, at most.",
    "max_episode_tokens": "Sampled tokens of all turns of an episode, at most.",
    "history": "What becomes of an episode whose chat template rewrites its history, as templates "
    "that drop earlier thoughts do: `split` is a sample for each turn, `append` is as sampled.",
    "keep_rollouts": "Whether every rollout is written below `output_dir`, and in which form.",
    "seed": "Decides what is drawn and sampled.",
    "evaluators": "Functions of your own, `FILE.py:score` with commas between several, that are "
    "called with a sampler of the live weights every `eval_every` steps and after the last.",
    "rare_evaluators": "The same, every `rare_eval_every` steps and after the last.",
    "rare_eval_every": "Steps between calls of `rare_evaluators`; 0: after the last only.",
    "evaluator_timeout_s": "What a call of an evaluator may take.",
    "save_every": "Steps between saves; 0: at the end only.",
    "log_to": "Where metrics go too: some of `tensorboard`, `wandb:PROJECT`, `trackio:PROJECT`.",
    "overwrite": "Whether to begin anew where `output_dir` holds an experiment; `--overwrite` "
    "sets it.",
}
"""Of settings that have no sentence below them in a recipe; a name means the same in all."""


def meaning_of(name: str) -> str:
    """Return what a setting means and may be, in words; empty if nothing is known of it."""
    rule = _RULES.get(name)
    wanted = "" if rule is None else f"{rule.wanted[:1].upper()}{rule.wanted[1:]}."
    return " ".join(filter(None, [_MEANINGS.get(name, ""), wanted]))


def check_settings(config: Any, *, without: Collection[str] = ()) -> None:
    """Refuse a configuration that cannot be trained with.

    Args:
        config: The `Config` of a recipe.
        without: Settings that mean something else in this recipe.

    Raises:
        ConfigurationError: If a setting is out of its range; names it as the user does.
    """
    for field in fields(config):
        rule = None if field.name in without else _RULES.get(field.name)
        value = getattr(config, field.name)
        # Written so that NaN, which compares with nothing, is refused.
        if rule is not None and not rule.holds(value):
            raise ConfigurationError(f"{field.name} is {value!r}", remedy=f"give {rule.wanted}")
        if field.name == "log_to":
            check_trackers(value)
