"""Self-play: a policy learns a game against a script, against itself, or against its past selves.

Every step plays games from both seats and takes one policy-gradient step; rewards are compared with
what each seat earns on average. The opponent is a script, or the policy as it is now (`self`). With
`league` it is, in a share of the games, a snapshot; those most often that it still loses to.

A model that cannot name a legal move learns nothing from playing. That is what the warm start is
for: the first `num_imitation_steps` steps are supervised, on the games of a script. They are steps
of the run like all others, in its curve and its metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith.client import Client
from tinsmith.games.league import describe_ratings
from tinsmith.recipes.experience import Experience, Scores, Source
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.rules import check_settings
from tinsmith.recipes.game_source import SELF, GameSource, GameSourceConfig
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.recipes.opponents import LEAGUE, Opponents
from tinsmith.recipes.reinforcement import About, Summary, learn
from tinsmith.recipes.tasks.agent_games import GameTask, check_script, load_game_of
from tinsmith.rollouts import DatumArrays
from tinsmith.rollouts.adapters import ServiceSampler

__all__ = ["Config", "Summary", "main"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings of the recipe."""

    base_model: str = "tiny"
    begin_from: str = ""
    data: str = "gomoku"
    """The game: `gomoku`, `kuhn`, `rock_paper_scissors`, or `FILE.py:CLASS` of your own."""
    board_size: int = 3
    row_length: int = 3
    numbered_cells: bool = False
    opponent: str = "self"
    """A script of the game (`random`, `greedy`, `search`; for Kuhn poker `random`, `honest`,
    `equilibrium`; for rock, paper, scissors `constant`, `biased`, `random`), `self`, `league`."""
    league_share: float = 0.5
    """Share of the games that are played against the league; the others are against `self`."""
    snapshot_every: int = 16
    """Steps between snapshots that join the league."""
    max_snapshots: int = 8
    """Snapshots that the league keeps."""
    teacher: str = "random"
    """The script that the warm start imitates."""
    num_imitation_steps: int = 40
    """Steps of the warm start, of `num_steps`."""
    imitation_learning_rate: float = 1e-2
    validation_opponent: str = "random"
    """The script that validation is played against."""
    adapter: str = "lora"
    rank: int = 32
    train_unembed: bool = False
    loss: str = "importance_sampling"
    learning_rate: float = 2e-3
    num_warmup_steps: int = 5
    learning_rate_floor: float = 0.1
    grad_clip_norm: float = 1.0
    baseline_decay: float = 0.95
    """Weight of what a seat's average reward was, at each game."""
    num_steps: int = 150
    num_games: int = 64
    temperature: float = 1.0
    max_tokens: int = 6
    """Sampled tokens of a move."""
    seed: int = 0
    num_validation: int = 100
    """Games against `validation_opponent` that are scored."""
    eval_every: int = 0
    """Steps between scores; 0: before and after only."""
    evaluators: str = ""
    rare_evaluators: str = ""
    rare_eval_every: int = 0
    evaluator_timeout_s: float = 1800.0
    save_every: int = 50
    keep_rollouts: str = ""
    """Whether every rollout is written below `output_dir`: `jsonl`, `parquet`; empty keeps none."""
    log_to: str = ""
    output_dir: Path | None = None
    """`runs/self_play-<data>-<n>` if it is left out: a folder of this experiment alone."""
    overwrite: bool = False
    checkpoint: str = "final"
    """Name of the checkpoint at the end."""

    def __post_init__(self) -> None:
        check_settings(self)


def main(config: Config, client: Client, observer: Observer | None = None) -> Summary:
    """Play and train, and score games against a script before and after.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Raises:
        ConfigurationError: If there is no such game or script, or `output_dir` holds another
            experiment.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    game = _check(config)
    [summary] = learn(
        About("self_play", config.data, "games"),
        config,
        client,
        lambda progress, experiment: _make_source(config, client, game, progress, experiment),
        observer,
    )
    return summary


def _check(config: Config) -> GameTask:
    game = load_game_of(config)
    if config.opponent not in (SELF, LEAGUE):
        check_script(game, "opponent", config.opponent)
    return game


def _make_source(
    config: Config,
    client: Client,
    game: GameTask,
    progress: ResumableRun,
    experiment: Experiment,
) -> Source:
    opponents = Opponents(
        config, client, progress.run, experiment.folder, first_step=progress.first_step
    )
    served = {model.base_model: model for model in client.list_models()}
    settings = GameSourceConfig(
        num_games=config.num_games,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        max_context_tokens=served[config.base_model].max_context_tokens,
        num_validation=config.num_validation,
        validation_opponent=config.validation_opponent,
        teacher=config.teacher,
        seed=config.seed,
    )
    sampler = progress.run.sampler()
    games = GameSource(
        settings,
        game,
        sampler.get_tokenizer(),
        ServiceSampler(sampler),
        baselines=opponents.baselines,
        league=opponents.league,
        open_snapshot=opponents.open_snapshot,
        keeper=RolloutKeeper(experiment.folder, config.keep_rollouts, sampler),
    )
    return _SelfPlaySource(config, games, opponents)


class _SelfPlaySource(Source):
    """Games of one policy against the opponents of its settings."""

    def __init__(self, config: Config, games: GameSource, opponents: Opponents) -> None:
        self._config = config
        self._games = games
        self._opponents = opponents
        self.plan = (_describe_plan(config),)

    @property
    def results(self) -> Sequence[str]:
        """How strong each opponent of the league is."""
        return describe_ratings(self._opponents.league.ratings())

    def play(self, step: int) -> list[Experience]:
        """Play the games of a step; see `Source`."""
        names = self._opponents.name(step, self._config.num_games)
        return [self._games.play(step, names)]

    def score(self, num_done: int) -> list[Scores]:
        """Play the games of the validation; see `Source`."""
        return [self._games.score(num_done)]

    def imitate(self, step: int) -> list[list[DatumArrays]]:
        """Return what the teacher says; see `Source`."""
        return [self._games.imitate(step)]

    def end_step(self, num_done: int) -> None:
        """Take a snapshot, where one is due."""
        self._opponents.end_step(num_done)

    def save(self, num_done: int) -> list[str]:
        """Keep league and baselines."""
        self._opponents.save(num_done)
        return []


def _describe_plan(config: Config) -> str:
    start = (
        f"imitates the script {config.teacher} for {config.num_imitation_steps} steps, then plays"
        if config.num_imitation_steps
        else "plays"
    )
    return f"{start} against {config.opponent}; validation is against {config.validation_opponent}"
