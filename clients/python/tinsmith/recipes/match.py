"""A match: several policies learn a game by playing each other, each with weights of its own.

The coordinator opens a match and keeps the policies in step. In each step they play `num_games`
games. Then each takes a policy-gradient step on its own side. In a job each agent may have a base
model, trainers and samplers of its own (`roles.agents`); else all are runs beside each other on one
server. A single policy plays against `opponent`, which learns nothing.

A model that cannot name a legal move learns nothing from playing. That is what the warm start is
for: the first `num_imitation_steps` steps are supervised, on the games of a script. Two beginners
teach each other little; in the `num_practice_steps` steps that follow, each learns from games
against a script of its own. Then they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinsmith.client import Client
from tinsmith.environments.naming import NamedEnvironment
from tinsmith.errors import ConfigurationError
from tinsmith.names import is_valid_id
from tinsmith.recipes.agents import RecipeAgent
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.settings import GameConfig
from tinsmith.recipes.game_source import load_game_of
from tinsmith.recipes.match_source import MatchSource, MatchSourceConfig
from tinsmith.recipes.match_table import OPPONENT, MakePlayer, MatchTable
from tinsmith.recipes.reinforcement import About, Summary, learn
from tinsmith.recipes.tasks.agent_games import (
    AGENTS,
    GameTask,
    check_script,
    choose_order,
)
from tinsmith.rollouts import PolicyPlayer
from tinsmith.rollouts.adapters import ServiceSampler
from tinsmith.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Config(GameConfig):
    """Settings of the recipe."""

    agents: str = "black,white"
    """Names of the policies, in the order of turns; a job names them by `roles.agents`."""
    order: str = ""
    """Of moves: `rotating` passes the first move from game to game, `fixed` leaves it to the first
    agent, `custom` asks the game, `simultaneous` is all at once; empty is the game's own."""
    opponent: str = ""
    """What plays the other seat of a single policy: a script of the game, or a checkpoint."""
    num_practice_steps: int = 0
    """Steps after the warm start, of `num_steps`, in which each policy plays against a script."""
    practice_opponent: str = "random"
    """The script that they practise against."""
    environment: str = ""
    """Where policies are scored instead of in games against the script: a served name, a class of
    your own, `FILE.py:CLASS` or `MODULE:CLASS`, or `grpc://HOST:PORT[/NAME]` of a server of
    `tinsmith env serve`."""
    turn_timeout_s: float = 1800.0
    """A game with a later turn is abandoned, and teaches nothing."""
    num_validation: int = 100
    """Games or episodes that each policy is scored in."""
    checkpoint: str = "final"
    """Name of the checkpoint of each policy at the end."""


def main(
    config: Config,
    client: Client,
    observer: Observer | None = None,
    agents: Sequence[RecipeAgent] = (),
) -> list[Summary]:
    """Play and train, and score each policy before and after.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Args:
        config: Settings.
        client: Of the service.
        observer: Of a job.
        agents: The policies of a job; runs of `client`, named by the settings, without.

    Returns:
        What came out, for each policy.

    Raises:
        ConfigurationError: If there is no such game, order, script or environment, or the seats
            are no two. Also if no step is left for the match, or `output_dir` holds another
            experiment.
        NotFoundError: If there is no such checkpoint to play against.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    game = load_game_of(config)
    order = choose_order(game, config.order)
    if config.num_practice_steps:
        check_script(game, "practice_opponent", config.practice_opponent)
        before = config.num_imitation_steps + config.num_practice_steps
        if before >= config.num_steps:
            raise ConfigurationError(
                f"num_steps is {config.num_steps}, and {before} of them come before the match",
                remedy="raise num_steps, or lower num_imitation_steps or num_practice_steps",
            )
    policies = tuple(agents) or _policies(config, client)
    environment = None
    if config.environment:
        environment = policies[0].client.environments.find(config.environment)
    num_seats = len(policies) + bool(config.opponent)
    if num_seats != len(AGENTS):
        what = f"{num_seats}, the opponent among them" if config.opponent else str(num_seats)
        raise ConfigurationError(
            f"{game.name} is a game of {len(AGENTS)} agents, not of {what}",
            remedy=f"name {len(AGENTS)} agents, or one and an opponent",
        )
    table = MatchTable(
        policies,
        opponent=_opponent(config, game, policies[0]) if config.opponent else None,
        order=order,
        num_games=config.num_games,
        turn_timeout_s=config.turn_timeout_s,
        seed=config.seed,
    )
    with table:
        return learn(
            About("match", config.data, "games"),
            config,
            policies[0].client,
            lambda progress, experiment: _make_source(
                config, game, table, policies, environment, progress, experiment
            ),
            observer,
        )


def _policies(config: Config, client: Client) -> tuple[RecipeAgent, ...]:
    names = [name.strip() for name in config.agents.split(",")]
    if len({*names, OPPONENT}) <= len(names) or not all(map(is_valid_id, names)):
        raise ConfigurationError(
            f"agents is {config.agents!r}",
            remedy=f"give different names, separated by a comma; none is {OPPONENT!r}",
        )
    return tuple(
        RecipeAgent(name, client, config.base_model, config.adapter, config.rank) for name in names
    )


def _opponent(config: Config, game: GameTask, policy: RecipeAgent) -> MakePlayer:
    """Return what plays the seat that does not learn."""
    if "/" not in config.opponent:
        check_script(game, "opponent", config.opponent)
        return lambda seed, _key: game.make_script(config.opponent, seed)
    sampler = policy.client.create_sampling_client(config.opponent)
    tokenizer, frozen = sampler.get_tokenizer(), ServiceSampler(sampler)
    params = SamplingParams(
        max_tokens=config.max_tokens, temperature=config.temperature, seed=config.seed
    )
    return lambda _seed, key: PolicyPlayer(tokenizer, frozen, params, game_key=key)


def _make_source(
    config: Config,
    game: GameTask,
    table: MatchTable,
    policies: Sequence[RecipeAgent],
    environment: NamedEnvironment | None,
    progress: ResumableRun,
    experiment: Experiment,
) -> MatchSource:
    longest = [
        model.max_context_tokens
        for policy in policies
        for model in policy.client.list_models()
        if model.base_model == policy.base_model
    ]
    settings = MatchSourceConfig(
        games=config,
        max_context_tokens=min(longest),
        environment=environment,
        opponent=config.opponent,
        practice=range(
            config.num_imitation_steps, config.num_imitation_steps + config.num_practice_steps
        ),
        practice_opponent=config.practice_opponent,
        partners={
            policy.name: replace(
                config,
                base_model=policy.base_model,
                adapter=policy.adapter,
                rank=policy.rank,
                seed=config.seed + index,
            )
            for index, policy in enumerate(policies[1:], start=1)
        },
    )
    return MatchSource(settings, game, table, policies, progress, experiment.folder)
