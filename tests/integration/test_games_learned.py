"""Two policies that learn a mixed strategy by playing each other in a match.

Each has a run of its own, and learns from its own side by policy gradient with a bonus for entropy.
What is judged is the strategy that each played on average, later steps counting more: in games
without a best pure strategy it is the average that comes to rest, while the policies still turn.
The warm start is of a script that can be exploited, and is no part of the average.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tests.integration.servers import BASE_MODEL, Deployment

import tinsmith
from tinsmith.games import Player, RockPaperScissorsGame, RpsPlayer
from tinsmith.games.rock_paper_scissors import HANDS, exploitability
from tinsmith.games.table import sit_down
from tinsmith.matches import MatchSpec, Member, play
from tinsmith.recipes.scripted_sampler import ScriptedSampler
from tinsmith.rollouts import (
    Conversation,
    RoleBaselines,
    RolloutConfig,
    RolloutRunner,
    Trajectory,
    trajectory_arrays,
)
from tinsmith.rollouts.adapters import ServiceSampler
from tinsmith.types import AdamParams, SamplingParams

NUM_WARM_STEPS = 30
WARM_GAMES = 16
CONFIG = RolloutConfig(max_turns=2, max_tokens_per_turn=4)

Seen = Sequence[tuple[str, str]]
"""What an agent knew at each of its turns, and its move; empty for text that is no move."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A game and how it is learned.

    Attributes:
        make_game: Returns a game by its number in a step.
        teacher: Returns the script of the warm start, by a seed.
        seen_by: Returns what an agent saw and did in a game that is over.
        turn_order: Of the match.
        num_steps: Steps after the warm start.
        num_games: Games of a step.
        learning_rate: At the beginning; a third of it at the end. The moments of Adam are off.
        entropy: Worth of a nat of surprise, in rewards.
    """

    make_game: Callable[[Sequence[str], int], Any]
    teacher: Callable[[int], Player]
    seen_by: Callable[[Any, int], Seen]
    turn_order: str
    num_steps: int
    num_games: int
    learning_rate: float
    entropy: float


@dataclass
class Learner:
    """One policy, and what it played."""

    agent: str
    run: tinsmith.TrainingRun
    baselines: RoleBaselines = field(default_factory=lambda: RoleBaselines(decay=0.9))
    played: dict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )

    def share(self, known: str, move: str) -> float:
        """Return how often a move was made where something was known."""
        moves = self.played[known]
        return moves[move] / sum(moves.values())


async def imitate(lesson: Lesson, learner: Learner, agents: Sequence[str], step: int) -> None:
    """Take a step towards what the teacher says."""
    tokenizer = learner.run.get_tokenizer()
    seat = agents.index(learner.agent)
    sequences = []
    for number in range(WARM_GAMES):
        seed = step * WARM_GAMES + number
        game = lesson.make_game(agents, seed)
        table = await sit_down(game, learner.agent, {agents[1 - seat]: lesson.teacher(2 * seed)})
        own = lesson.teacher(2 * seed + 1)
        conversation = Conversation(tokenizer)
        conversation.begin(table.observation.messages)
        script = ScriptedSampler(
            tokenizer,
            lambda own=own, game=game: own.choose_move(game, learner.agent),
            conversation.turn_ending()[:1],
        )
        trajectory = await RolloutRunner(tokenizer, script, CONFIG).run(_returning(table))
        sequences += trajectory_arrays(trajectory, 1.0)
    num_tokens = np.float32(sum(arrays.mask.sum() for arrays in sequences))
    data = [
        replace(arrays, mask=arrays.mask / num_tokens).to_supervised_datum() for arrays in sequences
    ]
    rate = 5e-3 * min(1.0, (step + 1) / 5) * (1.0 - 0.9 * step / NUM_WARM_STEPS)
    learner.run.forward_backward(data, "cross_entropy")
    await learner.run.optim_step(AdamParams(learning_rate=rate, grad_clip_norm=1.0)).result_async()


async def live(lesson: Lesson, learner: Learner, member: Member, agents: Sequence[str]) -> None:
    """Play and learn until the match is over."""
    run = learner.run
    runner = RolloutRunner(
        run.get_tokenizer(),
        ServiceSampler(run.sampler()),
        CONFIG,
        params=SamplingParams(temperature=1.0, seed=1),
    )
    async with member:
        for epoch in member.epochs():
            games = [lesson.make_game(agents, number) for number in range(lesson.num_games)]
            async with epoch.rollout():
                played = await asyncio.gather(
                    *(
                        runner.run(
                            _seated(member, epoch.index, number, game),
                            episode_key=f"{epoch.index}/{number}/{learner.agent}",
                        )
                        for number, game in enumerate(games)
                    )
                )
            async with epoch.update():
                data = []
                for game, trajectory in zip(games, played, strict=True):
                    if not trajectory.reason.is_infrastructure:
                        data += learn_from(lesson, learner, game, trajectory, agents, epoch.index)
                decay = 1.0 - 2.0 / 3.0 * epoch.index / lesson.num_steps
                rate = lesson.learning_rate * decay
                run.forward_backward(data, "importance_sampling")
                await run.optim_step(
                    AdamParams(learning_rate=rate, beta1=0.0, eps=1.0)
                ).result_async()


def learn_from(
    lesson: Lesson,
    learner: Learner,
    game: Any,
    trajectory: Trajectory,
    agents: Sequence[str],
    step: int,
) -> list[tinsmith.Datum]:
    """Note what was played, and return what is learned from a game."""
    [sample] = trajectory.samples
    advantages = []
    for turn, (known, move) in enumerate(lesson.seen_by(game, agents.index(learner.agent))):
        is_turn = sample.loss_mask & (sample.turn_indices == turn)
        # Text that is no move is surprising too, and is not what is to be kept alive.
        surprise = -float(sample.logprobs[is_turn].sum()) if move else 0.0
        value = trajectory.reward + lesson.entropy * surprise
        [advantage] = learner.baselines.advantages([known], [value])
        advantages.append(advantage / lesson.num_games)
        learner.played[known][move] += step + 1.0
    return [arrays.to_datum() for arrays in trajectory_arrays(trajectory, advantages)]


def learn(deployment: Deployment, lesson: Lesson) -> list[Learner]:
    """Let two policies learn a game, and return them."""
    agents = ("first", "second")
    with deployment.client() as client:
        learners = [Learner(agent, client.create_full_training_run(BASE_MODEL)) for agent in agents]

        async def all_steps() -> None:
            for step in range(NUM_WARM_STEPS):
                await asyncio.gather(*(imitate(lesson, each, agents, step) for each in learners))
            spec = MatchSpec(
                agents=agents,
                turn_order=lesson.turn_order,
                num_games=lesson.num_games,
                num_epochs=lesson.num_steps,
            )
            match = await client.matches.create_async(spec)
            members = [await client.matches.join_async(match.name, agent) for agent in agents]
            await asyncio.gather(
                *(
                    live(lesson, learner, member, agents)
                    for learner, member in zip(learners, members, strict=True)
                )
            )

        asyncio.run(all_steps())
    return learners


def _seated(member: Member, epoch: int, number: int, game: Any) -> Callable[[], Any]:
    return lambda: play(member, epoch, number, game)


def _returning(table: Any) -> Callable[[], Any]:
    async def create() -> Any:
        return table

    return create


def test_hands_are_learned_to_be_mixed(embedded: Deployment) -> None:
    lesson = Lesson(
        make_game=lambda agents, _number: RockPaperScissorsGame(agents),
        # Shows rock half of the time, which loses a quarter of the games more than it wins.
        teacher=lambda seed: RpsPlayer("biased", seed=seed),
        seen_by=lambda game, seat: [("", list(game.hands.values())[seat])],
        turn_order="simultaneous",
        num_steps=60,
        num_games=32,
        learning_rate=3e-2,
        entropy=0.3,
    )
    for learner in learn(embedded, lesson):
        policy = {hand: learner.share("", hand) for hand in HANDS}
        assert exploitability(policy) <= 0.1
