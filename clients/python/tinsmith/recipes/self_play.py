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

from tinsmith.client import Client
from tinsmith.games.league import describe_ratings
from tinsmith.recipes.experience import Experience, Scores, Source
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.settings import GameConfig
from tinsmith.recipes.game_source import SELF, GameSource, load_game_of
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.recipes.opponents import LEAGUE, Opponents
from tinsmith.recipes.reinforcement import About, Summary, learn
from tinsmith.recipes.tasks.agent_games import GameTask, check_script
from tinsmith.rollouts import DatumArrays
from tinsmith.rollouts.adapters import ServiceSampler

__all__ = ["Config", "Summary", "main"]


@dataclass(frozen=True, kw_only=True)
class Config(GameConfig):
    """Settings of the recipe."""

    opponent: str = "self"
    """A script of the game (`random`, `greedy`, `search`; for Kuhn poker `random`, `honest`,
    `equilibrium`; for rock, paper, scissors `constant`, `biased`, `random`), `self`, `league`."""
    league_share: float = 0.5
    """Share of the games that are played against the league; the others are against `self`."""
    snapshot_every: int = 16
    """Steps between snapshots that join the league."""
    max_snapshots: int = 8
    """Snapshots that the league keeps."""


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
    sampler = progress.run.sampler()
    games = GameSource(
        config,
        served[config.base_model].max_context_tokens,
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
