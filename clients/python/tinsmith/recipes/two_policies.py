"""Two policies learn a game from playing each other, each with a run and an optimizer of its own.

Both begin with the warm start of `self_play`: they imitate a script. Then every game is played
between them as they are now, and each takes a step on its own side of it. The game is zero-sum,
so gains of one are losses of the other. Both are scored against a script that stays the same.

`black` is the experiment's own run. `white` is its partner, of a base model of its own if wished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinsmith.client import Client
from tinsmith.games import League
from tinsmith.recipes.experience import Experience, Scores, Source
from tinsmith.recipes.experiment.beginnings import create_run
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.resume import (
    ResumableRun,
    continue_from,
    save_named,
    unique_name,
)
from tinsmith.recipes.experiment.settings import GameConfig
from tinsmith.recipes.game_source import GameSource, load_game_of
from tinsmith.recipes.kept_rollouts import TRAIN, RolloutKeeper
from tinsmith.recipes.kept_states import KeptStates
from tinsmith.recipes.reinforcement import About, Summary, learn
from tinsmith.recipes.shared_games import play_shared_games
from tinsmith.recipes.tasks.agent_games import GameTask
from tinsmith.rollouts import DatumArrays, RoleBaselines
from tinsmith.rollouts.adapters import ServiceSampler
from tinsmith.training.run_forms import TrainingRun

AGENTS = ("black", "white")
_SEEDS_APART = 500_000
"""Between the seeds of the two policies, so that neither draws what the other does."""


@dataclass(frozen=True, kw_only=True)
class Config(GameConfig):
    """Settings of the recipe."""

    partner_base_model: str = ""
    """Of `white`; the same if it is left out."""
    checkpoint: str = "final"
    """Name of both checkpoints at the end."""


def main(config: Config, client: Client, observer: Observer | None = None) -> list[Summary]:
    """Let both play and learn, and score each against a script.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Returns:
        What came out for `black` and for `white`.

    Raises:
        ConfigurationError: If there is no such game or script, or `output_dir` holds another
            experiment.
        KeyboardInterrupt: After Ctrl-C, once both are saved; the same call resumes.
    """
    game = load_game_of(config)
    return learn(
        About("two_policies", config.data, "games"),
        config,
        client,
        lambda progress, experiment: _TwoPolicies(config, client, game, progress, experiment),
        observer,
    )


class _TwoPolicies(Source):
    """Games of two runs against each other."""

    agents = AGENTS

    def __init__(
        self,
        config: Config,
        client: Client,
        game: GameTask,
        progress: ResumableRun,
        experiment: Experiment,
    ) -> None:
        self._config = config
        self._client = client
        self._game = game
        self._states = KeptStates(experiment.folder)
        self._keeper = RolloutKeeper(experiment.folder, config.keep_rollouts)
        self._baselines = [RoleBaselines(decay=config.baseline_decay) for _ in AGENTS]
        partner_config = replace(
            config,
            seed=config.seed + _SEEDS_APART,
            base_model=config.partner_base_model or config.base_model,
        )
        partner = self._open_partner(partner_config, progress.first_step)
        self.partners = (partner,)
        self._policies = [
            self._game_source(each, run, baselines, agent)
            for each, run, baselines, agent in zip(
                (config, partner_config),
                (progress.run, partner),
                self._baselines,
                AGENTS,
                strict=True,
            )
        ]
        self._kept = _Kept(progress.first_step, self._state_of_baselines())
        self.plan = (
            f"black is {progress.run.name}, white is {partner.name}; both imitate the script "
            f"{config.teacher} for {config.num_imitation_steps} steps, then play each other; "
            f"validation is against {config.validation_opponent}",
        )

    def play(self, step: int) -> list[Experience]:
        """Play the games of a step; see `Source`."""
        runners = [policy.runner(self._config.temperature) for policy in self._policies]
        played = asyncio.run(
            play_shared_games(
                self._game, runners, self._config.num_games, f"{self._config.seed}/{step}"
            )
        )
        found = []
        for index, policy in enumerate(self._policies):
            advantages = played.advantages(index, self._baselines[index])
            found.append(played.experience(index, advantages))
            policy.keep_games(TRAIN, step, played.episodes(index, advantages))
        return found

    def score(self, num_done: int) -> list[Scores]:
        """Play each policy's games against the script."""
        return [policy.score(num_done) for policy in self._policies]

    def imitate(self, step: int) -> list[list[DatumArrays]]:
        """Return what the teacher says, in games of its own for each policy."""
        return [policy.imitate(step) for policy in self._policies]

    def end_step(self, num_done: int) -> None:
        """Note the baselines that a save after this step keeps."""
        if self._kept.step != num_done:
            self._kept = _Kept(num_done, self._state_of_baselines())

    def save(self, num_done: int) -> list[str]:
        """Save the partner, and note its checkpoint beside the step."""
        self.end_step(num_done)
        [partner] = self.partners
        is_last = num_done >= self._config.num_steps
        name = self._config.checkpoint if is_last else unique_name(num_done)
        checkpoint = save_named(self._client, partner, name)
        self._states.write({**asdict(self._kept), "run": partner.name, "checkpoint": checkpoint})
        return [checkpoint]

    def _open_partner(self, config: Config, first_step: int) -> TrainingRun:
        if not first_step:
            return create_run(config, self._client, config.begin_from)
        kept = self._states.read(first_step)
        for baselines, state in zip(self._baselines, kept["baselines"], strict=True):
            baselines.restore(state)
        return continue_from(self._client, kept["run"], kept["checkpoint"])

    def _game_source(
        self, config: Config, run: TrainingRun, baselines: RoleBaselines, agent: str
    ) -> GameSource:
        sampler = run.sampler()
        served = {model.base_model: model for model in self._client.list_models()}
        return GameSource(
            config,
            served[config.base_model].max_context_tokens,
            self._game,
            sampler.get_tokenizer(),
            ServiceSampler(sampler),
            baselines=baselines,
            league=League(),
            keeper=self._keeper.of(agent, sampler),
        )

    def _state_of_baselines(self) -> list[dict[str, Any]]:
        return [dict(baselines.state) for baselines in self._baselines]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What both policies compare with, after a step."""

    step: int
    baselines: Sequence[dict[str, Any]]
