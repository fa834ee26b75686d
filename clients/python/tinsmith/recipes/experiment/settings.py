"""Settings that recipes share; the `Config` of a recipe adds its own, and its own defaults.

A name means the same in every recipe. What has no sentence here has one in `rules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinsmith.environments.local import STEP_TIMEOUT_S
from tinsmith.recipes.experiment.rules import check_settings


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of every recipe that trains."""

    base_model: str = "tiny"
    begin_from: str = ""
    data: str = ""
    adapter: str = "lora"
    rank: int = 32
    learning_rate: float | None = None
    num_warmup_steps: int = 5
    learning_rate_floor: float = 0.1
    grad_clip_norm: float = 1.0
    num_steps: int = 60
    seed: int = 0
    eval_every: int = 0
    """Steps between scores of what is held out; 0: before and after only."""
    evaluators: str = ""
    rare_evaluators: str = ""
    rare_eval_every: int = 0
    evaluator_timeout_s: float = 1800.0
    save_every: int = 50
    log_to: str = ""
    output_dir: Path | None = None
    """`runs/<recipe>-<data>-<n>` if it is left out: a folder of this experiment alone."""
    overwrite: bool = False
    checkpoint: str = "final"
    """Name of the checkpoint at the end."""

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class RewardedConfig(TrainingConfig):
    """Settings of every recipe that learns from what it sampled, after a warm start."""

    loss: str = "importance_sampling"
    num_imitation_steps: int = 0
    """Steps of a warm start, of `num_steps`."""
    imitation_learning_rate: float = 1e-2
    temperature: float = 1.0
    max_tokens: int = 4
    num_validation: int = 64


@dataclass(frozen=True, kw_only=True)
class GameConfig(RewardedConfig):
    """Settings of every recipe that plays a game."""

    data: str = "gomoku"
    """The game: `gomoku`, `kuhn`, `rock_paper_scissors`, or `FILE.py:CLASS` of your own."""
    board_size: int = 3
    row_length: int = 3
    numbered_cells: bool = False
    teacher: str = "random"
    """The script that the warm start imitates."""
    num_imitation_steps: int = 40
    validation_opponent: str = "random"
    """The script that each policy is scored against."""
    train_unembed: bool = False
    learning_rate: float = 2e-3
    baseline_decay: float = 0.95
    """Weight of what a seat's average reward was, at each game."""
    num_steps: int = 150
    num_games: int = 64
    max_tokens: int = 6
    """Sampled tokens of a move."""
    num_validation: int = 100
    """Games that each policy is scored in."""
    keep_rollouts: str = ""


@dataclass(frozen=True, kw_only=True)
class PlayConfig:
    """Settings of every recipe that plays rows of data, or an environment."""

    data: str = ""
    environment: str = ""
    """What is played instead of `data`: a served name such as `guessing`, a class of your own,
    `FILE.py:CLASS` or `MODULE:CLASS`, or `grpc://HOST:PORT[/NAME]` of a `tinsmith env serve`."""
    environment_config: str = ""
    rollouts: str = "client"
    """Where episodes are played: in the `client`, or of a served name on the `server`."""
    reward: str = ""
    """A function of your own, `FILE.py:score`, called with a row of `data` and the answer."""
    judge: str = ""
    """A model that scores the answers instead, from 0 to 1: a base model, or a checkpoint."""
    judge_instruction: str = ""
    """What a good answer is, for the judge."""
    step_timeout_s: float = STEP_TIMEOUT_S
    """What a step of your own environment, or a call of a reward or judge, may take."""
    max_turns: int = 16
    max_episode_tokens: int = 4096
    history: str = "refuse"
    keep_rollouts: str = ""
