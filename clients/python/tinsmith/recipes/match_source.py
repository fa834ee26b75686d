"""Policies that play each other as the source of experience: each learns from its own side.

Rewards are compared with what the same place in the order of turns earns on average, since there is
no group of equal games. Each policy is scored apart, against a script or in a served environment,
so that it shows whether one became better or the other worse.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinsmith.client import Client
from tinsmith.environments.naming import NamedEnvironment
from tinsmith.errors import NotFoundError
from tinsmith.games import League
from tinsmith.recipes.agents import RecipeAgent
from tinsmith.recipes.experience import (
    Experience,
    Scores,
    Source,
    SourceConfig,
    answers_of,
    length_metrics,
)
from tinsmith.recipes.experiment.beginnings import create_run
from tinsmith.recipes.experiment.resume import (
    ResumableRun,
    continue_from,
    save_named,
    unique_name,
)
from tinsmith.recipes.experiment.settings import GameConfig
from tinsmith.recipes.game_source import GameSource, LearnedGame
from tinsmith.recipes.kept_rollouts import TRAIN, RolloutKeeper
from tinsmith.recipes.kept_states import KeptStates
from tinsmith.recipes.match_table import MatchTable, PlayedSeat
from tinsmith.recipes.named_source import EnvironmentPlan, NamedSource
from tinsmith.recipes.tasks.agent_games import AGENTS, GameTask
from tinsmith.rollouts import (
    DatumArrays,
    RoleBaselines,
    RolloutConfig,
    RolloutRunner,
    trajectory_arrays,
)
from tinsmith.rollouts.adapters import ServiceSampler
from tinsmith.training.run_forms import TrainingRun
from tinsmith.types import SamplingParams

_MAX_SEED = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchSourceConfig:
    """How much is played and scored.

    Attributes:
        games: Settings of the recipe; of each policy alone are the warm start and the validation.
        max_context_tokens: Of the models of all policies.
        environment: In which policies are scored; None for games against the script.
        opponent: What plays the other seat of a single policy; empty where all learn.
        practice: Steps in which each policy plays against a script, before they meet.
        practice_opponent: That script.
        partners: Settings of the runs of all policies but the first, by name.
    """

    games: GameConfig
    max_context_tokens: int
    environment: NamedEnvironment | None
    opponent: str
    practice: range
    practice_opponent: str
    partners: Mapping[str, GameConfig]


class MatchSource(Source):
    """Games of a match.

    Args:
        config: How much.
        game: What is played.
        table: The match.
        policies: The policies, the experiment's own first.
        progress: The run of the first policy.
        folder: Where the other policies' saves are kept.
    """

    def __init__(
        self,
        config: MatchSourceConfig,
        game: GameTask,
        table: MatchTable,
        policies: Sequence[RecipeAgent],
        progress: ResumableRun,
        folder: Path,
    ) -> None:
        self._config = config
        self._game = game
        self._table = table
        self._policies = tuple(policies)
        self._states = KeptStates(folder)
        self._keeper = RolloutKeeper(folder, config.games.keep_rollouts)
        self.agents = tuple(policy.name for policy in policies)
        names = " and ".join(self.agents)
        where = f"the script {config.games.validation_opponent}"
        if config.environment is not None:
            where = config.environment.given
        plays = f"plays against {config.opponent}" if config.opponent else "play each other"
        if config.practice:
            script, last = config.practice_opponent, config.practice.stop
            plays = f"practise against {script} until step {last}, then {plays}"
        self.plan = (f"{names} {plays}; each is scored against {where}",)
        self._baselines = {
            name: RoleBaselines(decay=config.games.baseline_decay) for name in self.agents
        }
        if progress.first_step:
            self.partners = self._go_on(progress.first_step)
        else:
            self.partners = [
                create_run(config.partners[policy.name], policy.client, progress.begin_from)
                for policy in self._policies[1:]
            ]
        self._runners: dict[str, RolloutRunner] = {}
        self._games: list[GameSource] = []
        self._environments: list[NamedSource] = []
        for policy, run in zip(self._policies, [progress.run, *self.partners], strict=True):
            self._prepare(policy, run)

    def play(self, step: int) -> list[Experience]:
        """Play the games of a step; see `Source`."""
        config = self._config
        if step in config.practice:
            opponents = [config.practice_opponent] * config.games.num_games
            return [games.play(step, opponents) for games in self._games]
        key = f"{config.games.seed}/{step}"
        generator = random.Random(f"match:{key}")
        seeds = [generator.randrange(_MAX_SEED) for _ in range(config.games.num_games)]
        played = self._table.play(self._runners, self._game.seat, seeds, key=key)
        return [
            self._experience(agent, games, played[agent], step)
            for agent, games in zip(self.agents, self._games, strict=True)
        ]

    def score(self, num_done: int) -> list[Scores]:
        """Score each policy by itself; see `Source`."""
        if self._environments:
            return [source.score(num_done)[0] for source in self._environments]
        return [source.score(num_done) for source in self._games]

    def imitate(self, step: int) -> list[list[DatumArrays]]:
        """Return what the teacher says to each policy; see `Source`."""
        return [source.imitate(step) for source in self._games]

    def end_step(self, num_done: int) -> None:
        """Let the next epoch of the match begin."""
        del num_done
        self._table.end_update()

    def save(self, num_done: int) -> list[str]:
        """Save the partners and what places earn; see `Source`."""
        is_last = num_done >= self._config.games.num_steps
        name = self._config.games.checkpoint if is_last else unique_name(num_done)
        pairs = list(zip(self._policies[1:], self.partners, strict=True))
        saved = {policy.name: save_named(policy.client, run, name) for policy, run in pairs}
        dropped = self._states.write(
            {
                "step": num_done,
                "partners": {
                    policy.name: {"run": run.name, "checkpoint": saved[policy.name]}
                    for policy, run in pairs
                },
                "baselines": {agent: each.state for agent, each in self._baselines.items()},
            }
        )
        for state in dropped:
            for policy, _ in pairs:
                _forget(policy.client, state["partners"][policy.name]["checkpoint"], saved.values())
        return list(saved.values())

    def _prepare(self, policy: RecipeAgent, run: TrainingRun) -> None:
        config, games = self._config, self._config.games
        sampler = run.sampler()
        tokenizer = sampler.get_tokenizer()
        keeper = self._keeper.of(policy.name, sampler)
        self._runners[policy.name] = RolloutRunner(
            tokenizer,
            ServiceSampler(sampler),
            RolloutConfig(
                max_turns=self._game.max_turns,
                max_tokens_per_turn=games.max_tokens,
                max_context_tokens=config.max_context_tokens,
            ),
            params=SamplingParams(temperature=games.temperature, seed=games.seed),
        )
        self._games.append(
            GameSource(
                games,
                config.max_context_tokens,
                self._game,
                tokenizer,
                ServiceSampler(sampler),
                baselines=self._baselines[policy.name],
                league=League(),
                open_snapshot=lambda player: ServiceSampler(
                    policy.client.create_sampling_client(player.source)
                ),
                keeper=keeper,
            )
        )
        if config.environment is not None:
            self._environments.append(
                NamedSource(
                    SourceConfig(
                        num_tasks=1,
                        group_size=2,
                        temperature=games.temperature,
                        max_tokens=games.max_tokens,
                        num_validation=games.num_validation,
                        seed=games.seed,
                    ),
                    sampler,
                    policy.client,
                    EnvironmentPlan(
                        environment=config.environment,
                        settings={},
                        validation_environment=config.environment,
                        validation_settings={},
                        max_context_tokens=config.max_context_tokens,
                    ),
                    keeper,
                )
            )

    def _go_on(self, step: int) -> list[TrainingRun]:
        """Return the partners' runs as they were after a step."""
        kept = self._states.read(step)
        for agent, state in kept["baselines"].items():
            self._baselines[agent].restore(state)
        runs = []
        for policy in self._policies[1:]:
            saved = kept["partners"][policy.name]
            runs.append(continue_from(policy.client, saved["run"], saved["checkpoint"]))
        return runs

    def _experience(
        self, agent: str, games: GameSource, played: Sequence[PlayedSeat], step: int
    ) -> Experience:
        roles = [AGENTS[seat.position] for seat in played]
        rewards = [seat.trajectory.reward for seat in played]
        advantages = self._baselines[agent].advantages(roles, rewards)
        opponent = self._config.opponent or "partner"
        learned = (
            LearnedGame(seat.trajectory, seat.seed, role, opponent, advantage)
            for seat, role, advantage in zip(played, roles, advantages, strict=True)
        )
        games.keep_games(TRAIN, step, learned)
        sequences = [
            arrays
            for seat, advantage in zip(played, advantages, strict=True)
            for arrays in trajectory_arrays(seat.trajectory, advantage)
        ]
        return Experience(sequences, len(rewards), _mean(rewards), self._describe(played))

    def _describe(self, played: Sequence[PlayedSeat]) -> dict[str, float]:
        metrics = {
            f"reward_{role}": _mean(
                [seat.trajectory.reward for seat in played if AGENTS[seat.position] == role]
            )
            for role in AGENTS
        }
        metrics["is_success"] = _mean([seat.trajectory.reward > 0 for seat in played])
        metrics["turns"] = _mean([len(seat.trajectory.turns) for seat in played])
        metrics |= length_metrics(answers_of(seat.trajectory for seat in played))
        metrics["lost"] = float(self._config.games.num_games - len(played))
        return metrics


def _forget(client: Client, checkpoint: str, kept: Collection[str]) -> None:
    if checkpoint not in kept:
        with suppress(NotFoundError):
            client.checkpoints.delete(checkpoint)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
