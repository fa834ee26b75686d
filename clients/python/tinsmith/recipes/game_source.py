"""Games as the source of experience: the learner at one seat, an opponent at the other.

Seats alternate from game to game. An opponent is a script, the policy as it is now, or a member of
a league: the policy as it once was. What an opponent says is not trained on. Rewards are compared
with what the same seat earns on average (`RoleBaselines`), since there is no group of equal games.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from tinsmith.games import GameOverError, League, LeaguePlayer, Player, TableInstance, sit_down
from tinsmith.recipes.experience import Experience, Scores, answers_of, length_metrics
from tinsmith.recipes.experiment.settings import GameConfig
from tinsmith.recipes.kept_rollouts import KEEP_NOTHING, TRAIN, VALIDATION, RolloutKeeper
from tinsmith.recipes.scripted_sampler import ScriptedSampler
from tinsmith.recipes.tasks.agent_games import AGENTS, GameTask, check_script, load_game
from tinsmith.rollouts import (
    Conversation,
    DatumArrays,
    GroupConfig,
    GroupResult,
    PolicyPlayer,
    RoleBaselines,
    RolloutConfig,
    RolloutRunner,
    Trajectory,
    trajectory_arrays,
)
from tinsmith.rollouts.groups import run_groups
from tinsmith.rollouts.interfaces import ChatTokenizer, Sampler
from tinsmith.rollouts.records import Origin
from tinsmith.rollouts.records.record import LOCAL
from tinsmith.types import SamplingParams

SELF = "self"
"""Name of the policy as it is now, among opponents."""

_VALIDATION_SEED = 1_000_000_000
_MAX_CONCURRENCY = 64
_MAX_BEGINNINGS = 8


def load_game_of(config: GameConfig) -> GameTask:
    """Return the game of a recipe, which has the scripts that its settings name.

    Raises:
        ConfigurationError: If there is no such game, board or script.
    """
    game = load_game(
        config.data,
        board_size=config.board_size,
        row_length=config.row_length,
        numbered_cells=config.numbered_cells,
    )
    check_script(game, "teacher", config.teacher)
    check_script(game, "validation_opponent", config.validation_opponent)
    return game


@dataclass(frozen=True, slots=True)
class Seat:
    """One game from the learner's side.

    Attributes:
        seed: Of the game and of scripts in it.
        agent: The learner's seat.
        opponent: Name of what plays the other seat.
    """

    seed: int
    agent: str
    opponent: str


@dataclass(frozen=True, slots=True)
class LearnedGame:
    """The learner's side of a game that came to its end.

    Attributes:
        episode: What it saw, said and earned.
        seed: Of the game.
        seat: The learner's.
        opponent: Name of what played the other seat.
        advantage: What the episode was worth; None where nothing was learned from it.
    """

    episode: Trajectory
    seed: int
    seat: str
    opponent: str
    advantage: float | None


class GameSource:
    """Plays games under the live weights.

    Args:
        config: How much, and how.
        max_context_tokens: Of the model.
        game: What is played.
        tokenizer: Of the model.
        sampler: Of the live weights.
        baselines: What each seat earns on average; moved by each step.
        league: Opponents by name; results are noted in it.
        open_snapshot: Returns a sampler of a league player's checkpoint; None without a league.
        keeper: Keeps what is played.
    """

    def __init__(
        self,
        config: GameConfig,
        max_context_tokens: int,
        game: GameTask,
        tokenizer: ChatTokenizer,
        sampler: Sampler,
        *,
        baselines: RoleBaselines,
        league: League,
        open_snapshot: Callable[[LeaguePlayer], Sampler] | None = None,
        keeper: RolloutKeeper = KEEP_NOTHING,
    ) -> None:
        self._keeper = keeper
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._game = game
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._baselines = baselines
        self._league = league
        self._open_snapshot = open_snapshot
        self._num_forfeited = 0

    def play(self, step: int, opponents: Sequence[str]) -> Experience:
        """Play a step's games, one against each of the opponents named.

        Raises:
            NoRolloutsError: If no game came to an end.
        """
        key = f"{self._config.seed}/{step}"
        seats = _seats(key, opponents)
        self._num_forfeited = 0
        result = self._run(seats, temperature=self._config.temperature, key=key)
        roles = [group.task.agent for group in result.groups]
        rewards = [group.rewards[0] for group in result.groups]
        advantages = self._baselines.advantages(roles, rewards)
        self._keep(TRAIN, step, result, advantages)
        self._note_results(result)
        sequences = [
            arrays
            for group, advantage in zip(result.groups, advantages, strict=True)
            for arrays in trajectory_arrays(group.trajectories[0], advantage)
        ]
        return Experience(sequences, len(rewards), _mean(rewards), self._describe(result))

    def imitate(self, step: int) -> list[DatumArrays]:
        """Return what the teacher says in a step's games, which it plays from both seats."""
        config = self._config
        key = f"imitation/{config.seed}/{step}"
        return asyncio.run(self._imitate(_seats(key, [config.teacher] * config.num_games)))

    def score(self, num_done: int) -> Scores:
        """Return the reward of each validation game, the learner's moves drawn greedily.

        A game that is won is a success.
        """
        seats = [
            Seat(_VALIDATION_SEED + index, AGENTS[index % 2], self._config.validation_opponent)
            for index in range(self._config.num_validation)
        ]
        result = self._run(seats, temperature=0.0, key="validation")
        self._keep(VALIDATION, num_done, result)
        rewards = [group.rewards[0] for group in result.groups]
        return Scores(rewards, [float(reward > 0) for reward in rewards])

    def runner(self, temperature: float) -> RolloutRunner:
        """Return what plays a seat with the learner's policy."""
        return RolloutRunner(
            self._tokenizer,
            self._sampler,
            self._rollout_config(),
            params=self._params(temperature),
        )

    def keep_games(self, phase: str, num_done: int, games: Iterable[LearnedGame]) -> None:
        """Keep the learner's side of games, if rollouts are kept.

        Args:
            phase: `train`, or `validation`, which is played greedily.
            num_done: Optimizer steps that were done before.
            games: What was played.
        """
        params = self._params(0.0 if phase == VALIDATION else self._config.temperature)
        limits = self._rollout_config()

        def origin_of(game: LearnedGame) -> Origin:
            return self._keeper.origin(
                params,
                limits,
                kind=LOCAL,
                environment=self._game.name,
                environment_config={"seat": game.seat, "opponent": game.opponent},
                environment_seed=game.seed,
            )

        episodes = ((game.episode, origin_of(game), game.advantage) for game in games)
        self._keeper.keep_episodes(phase, num_done, episodes, self._tokenizer)

    def _params(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=self._config.seed)

    def _keep(
        self,
        phase: str,
        num_done: int,
        result: GroupResult[Seat],
        advantages: Sequence[float] = (),
    ) -> None:
        games = (
            LearnedGame(
                group.trajectories[0],
                group.task.seed,
                group.task.agent,
                group.task.opponent,
                advantage,
            )
            for group, advantage in zip_longest(result.groups, advantages)
        )
        self.keep_games(phase, num_done, games)

    def _run(self, seats: Sequence[Seat], *, temperature: float, key: str) -> GroupResult[Seat]:
        runner = self.runner(temperature)
        limits = GroupConfig(group_size=1, min_group_size=1, max_concurrency=_MAX_CONCURRENCY)
        return asyncio.run(
            run_groups(runner, seats, lambda seat: self._sit_down(seat, key), limits, batch_key=key)
        )

    def _rollout_config(self) -> RolloutConfig:
        return RolloutConfig(
            max_turns=self._game.max_turns,
            max_tokens_per_turn=self._config.max_tokens,
            max_context_tokens=self._max_context_tokens,
        )

    async def _sit_down(self, seat: Seat, key: str) -> TableInstance:
        """Begin a game; one that an opponent forfeits before the learner's first turn, again."""
        [other] = [agent for agent in AGENTS if agent != seat.agent]
        for attempt in range(_MAX_BEGINNINGS):
            opponent = self._opponent(seat, f"{key}/{seat.seed}/{attempt}")
            with contextlib.suppress(GameOverError):
                return await sit_down(
                    self._game.make_game(seat.seed), seat.agent, {other: opponent}
                )
            self._num_forfeited += 1
        raise GameOverError(f"{seat.opponent} forfeited {_MAX_BEGINNINGS} games at its first move")

    def _opponent(self, seat: Seat, key: str) -> Player:
        if seat.opponent in self._game.scripts:
            return self._game.make_script(seat.opponent, seat.seed)
        config = self._config
        sampler = self._sampler
        if seat.opponent != SELF:
            assert self._open_snapshot is not None, "a league needs its snapshots opened"
            [player] = [each for each in self._league.players if each.name == seat.opponent]
            sampler = self._open_snapshot(player)
        params = SamplingParams(
            max_tokens=config.max_tokens, temperature=config.temperature, seed=config.seed
        )
        return PolicyPlayer(self._tokenizer, sampler, params, game_key=f"{key}/opponent")

    async def _imitate(self, seats: Sequence[Seat]) -> list[DatumArrays]:
        sequences = []
        for seat in seats:
            instance = await self._sit_down(seat, "imitation")
            teacher = self._game.make_script(self._config.teacher, seat.seed + 1)
            conversation = Conversation(self._tokenizer)
            conversation.begin(instance.observation.messages)
            script = ScriptedSampler(
                self._tokenizer,
                # The script looks at the game itself.
                partial(teacher.choose_move, instance.game, seat.agent),
                conversation.turn_ending()[:1],
            )
            runner = RolloutRunner(self._tokenizer, script, self._rollout_config())
            trajectory = await runner.run(_returning(instance))
            sequences += trajectory_arrays(trajectory, 1.0)
        return sequences

    def _note_results(self, result: GroupResult[Seat]) -> None:
        for group in result.groups:
            if group.task.opponent in {player.name for player in self._league.players}:
                score = self._game.share_won(group.rewards[0])
                self._league.record(self._league.learner, group.task.opponent, score)

    def _describe(self, result: GroupResult[Seat]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for agent in AGENTS:
            rewards = [group.rewards[0] for group in result.groups if group.task.agent == agent]
            metrics[f"reward_{agent}"] = _mean(rewards)
        plays = [group.trajectories[0] for group in result.groups]
        rewards = [group.rewards[0] for group in result.groups]
        metrics["is_success"] = _mean([reward > 0 for reward in rewards])
        metrics["turns"] = _mean([len(play.turns) for play in plays])
        metrics |= length_metrics(answers_of(plays))
        metrics["forfeited"] = float(self._num_forfeited)
        metrics["lost"] = float(result.report.num_lost)
        return metrics


def _seats(key: str, opponents: Sequence[str]) -> list[Seat]:
    """Return a game against each opponent; equal keys give equal games."""
    generator = random.Random(f"games:{key}")
    return [
        Seat(generator.randrange(_VALIDATION_SEED), AGENTS[index % 2], opponent)
        for index, opponent in enumerate(opponents)
    ]


def _returning(instance: TableInstance) -> Callable[[], Any]:
    async def create() -> TableInstance:
        return instance

    return create


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
