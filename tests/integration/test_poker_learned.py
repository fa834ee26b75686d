"""Two policies learn Kuhn poker by playing each other, up to what the game is worth.

Each has a run of its own and takes a policy-gradient step on its own side of sampled games, with a
bonus for entropy. What is judged is the mean of the strategies, later steps counting more. It is
the mean that comes to rest, while the policies still turn about the best there is. The first third
of the steps is no part of it, and neither is the warm start, of a script that can be exploited.

What keeps the noise down, so that minutes are enough:

* Every deal is played equally often, and games that come to the same prompt draw from one request.
* A reward is compared with the mean of its state, the hidden card included. That takes the luck of
  the cards off, and favours no move, since no agent's move depends on the hidden card.
* A strategy is the probability of the sampled move, as the sampler has it, and is not counted.
* The card is the last token of a prompt. A model of two layers tells prompts apart by their last
  tokens above all; under the usual chat template a step moves all situations together.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from tests.integration.servers import BASE_MODEL, Deployment

import tinsmith
from tinsmith.games import KuhnGame, KuhnPlayer
from tinsmith.games.kuhn import BET, PASS, VALUE, best_response_value, information_set
from tinsmith.rollouts import RoleBaselines
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

NUM_WARM_STEPS = 30
NUM_STEPS = 400
NUM_GAMES = 240
LEARNING_RATE = 3e-2
"""Of plain gradient descent; a third of it at the end."""
ENTROPY, LAST_ENTROPY = 0.15, 0.045
"""Worth of a nat of surprise, in chips, at the beginning and at the end."""

AGENTS = ("first", "second")
DEALS = [(first, second) for first in range(3) for second in range(3) if first != second]


@dataclass(frozen=True)
class Draw:
    """One answer of a policy.

    Attributes:
        tokens: What was sampled, its end included.
        logprobs: Of each token.
        move: `bet` or `pass`; empty for text that is no move.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    move: str

    @property
    def logprob(self) -> float:
        """Of the whole answer."""
        return math.fsum(self.logprobs)


@dataclass(frozen=True)
class Turn:
    """A turn of a game.

    Attributes:
        seat: Whose it was.
        known: What the agent knew.
        state: What there was to know.
        draw: What the agent said.
    """

    seat: int
    known: str
    state: str
    draw: Draw


@dataclass
class PlayedGame:
    """A game and its turns."""

    game: KuhnGame
    turns: list[Turn] = field(default_factory=list)

    @property
    def known(self) -> str:
        """What the next agent knows."""
        card = self.game.deal[len(self.game.history) % 2]
        return information_set(card, self.game.history)

    def take(self, draw: Draw) -> None:
        """Make the next agent's move."""
        seat = len(self.game.history) % 2
        state = f"{self.game.deal} {' '.join(self.game.history)}"
        self.turns.append(Turn(seat, self.known, state, draw))
        self.game.apply({AGENTS[seat]: draw.move})


@dataclass
class Policy:
    """What sits at one seat, and learns.

    Attributes:
        run: Its run.
        sampler: Of the run's newest weights.
        baselines: What each state earns on average.
        strategy: Probability to bet by what is known, in the newest step that came to it.
        mean: The same over steps: a sum by weight, and the weights.
    """

    run: tinsmith.TrainingRun
    sampler: tinsmith.Sampler
    baselines: RoleBaselines = field(default_factory=lambda: RoleBaselines(decay=0.9))
    strategy: dict[str, float] = field(default_factory=dict)
    mean: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))

    @classmethod
    def of(cls, client: tinsmith.Client) -> Policy:
        """Return a new one."""
        run = client.create_full_training_run(BASE_MODEL)
        return cls(run, run.sampler())

    def prompt(self, known: str) -> list[int]:
        """Return what the model reads: the moves so far, and its card."""
        card, _, moves = known.partition(" ")
        return self.run.get_tokenizer().encode(f"{moves or 'none'} {card}")

    async def draw(self, known: str, number: int, seed: int) -> list[Draw]:
        """Return answers to one prompt."""
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=seed)
        found = await self.sampler.sample(self.prompt(known), number, params)
        tokenizer = self.run.get_tokenizer()
        moves = {
            tokens: tokenizer.decode(tokens).removesuffix("<|im_end|>")
            for tokens in {tuple(each.tokens) for each in found.sequences}
        }
        return [
            Draw(tuple(each.tokens), tuple(each.logprobs), move if move in (BET, PASS) else "")
            for each in found.sequences
            for move in [moves[tuple(each.tokens)]]
        ]

    def note_strategy(self, games: Sequence[PlayedGame], seat: int, weight: float) -> None:
        """Read the strategy off what was sampled, and add it to the mean."""
        seen: dict[str, dict[str, float]] = defaultdict(dict)
        for game in games:
            for turn in game.turns:
                if turn.seat == seat and turn.draw.move:
                    seen[turn.known][turn.draw.move] = math.exp(turn.draw.logprob)
        for known, chances in seen.items():
            bet = chances.get(BET, 1.0 - chances.get(PASS, 0.0))
            passed = chances.get(PASS, 1.0 - chances.get(BET, 0.0))
            self.strategy[known] = bet / (bet + passed)
        for known, chance in self.strategy.items():
            # What is known after a pass of its own counts as often as it passes.
            card, _, moves = known.partition(" ")
            reach = 1.0 - self.strategy[card] if moves == f"{PASS} {BET}" else 1.0
            self.mean[known][0] += weight * reach * chance
            self.mean[known][1] += weight * reach

    @property
    def mean_strategy(self) -> dict[str, float]:
        """Probability to bet by what is known, over all steps that were noted."""
        return {known: total / weight for known, (total, weight) in self.mean.items()}


async def play(
    answer: Callable[[int, str, int], Awaitable[Sequence[Draw]]], num_games: int
) -> list[PlayedGame]:
    """Play games to their end, all in step: games that know the same are answered together.

    Args:
        answer: Returns as many draws as are asked for, of a seat that knows something.
        num_games: How many.
    """
    games = [PlayedGame(KuhnGame(AGENTS, DEALS[n % len(DEALS)])) for n in range(num_games)]
    while waiting := [each for each in games if each.game.next_agents]:
        groups: dict[tuple[int, str], list[PlayedGame]] = defaultdict(list)
        for each in waiting:
            groups[len(each.game.history) % 2, each.known].append(each)
        asked = (answer(seat, known, len(group)) for (seat, known), group in groups.items())
        for group, draws in zip(groups.values(), await asyncio.gather(*asked), strict=True):
            for each, draw in zip(group, draws, strict=True):
                each.take(draw)
    return games


async def imitate(policy: Policy, seat: int, step: int) -> None:
    """Take a step towards a script that is honest in every other game, and plays at random else."""
    tokenizer = policy.run.get_tokenizer()
    counts: Counter[tuple[str, str]] = Counter()
    for number in range(60):
        seed = 60 * step + number
        game = PlayedGame(KuhnGame(AGENTS, DEALS[number % len(DEALS)]))
        player = KuhnPlayer("honest" if number // len(DEALS) % 2 else "random", seed=seed)
        while agents := game.game.next_agents:
            move = await player.choose_move(game.game, agents[0])
            if agents[0] == AGENTS[seat]:
                counts[game.known, move] += 1
            game.take(Draw((), (), move))
    total = sum(counts.values())
    data = []
    for (known, move), count in counts.items():
        prompt = policy.prompt(known)
        answer = tokenizer.encode(f"{move}<|im_end|>")
        weights = [0.0] * (len(prompt) - 1) + [count / total] * len(answer)
        data.append(_datum([*prompt, *answer], weights=weights))
    rate = 5e-3 * min(1.0, (step + 1) / 5) * (1.0 - 0.9 * step / NUM_WARM_STEPS)
    policy.run.forward_backward(data, "cross_entropy")
    await policy.run.optim_step(AdamParams(learning_rate=rate, grad_clip_norm=1.0)).result_async()


async def improve(policy: Policy, games: Sequence[PlayedGame], seat: int, step: int) -> None:
    """Take a policy-gradient step on one side of games."""
    share_done = step / NUM_STEPS
    entropy = ENTROPY + share_done * (LAST_ENTROPY - ENTROPY)
    draws: dict[tuple[str, tuple[int, ...]], Draw] = {}
    advantages: dict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    for game in games:
        for turn in game.turns:
            if turn.seat != seat:
                continue
            # Text that is no move is surprising too, and is not what is to be kept alive.
            bonus = -entropy * turn.draw.logprob if turn.draw.move else 0.0
            value = game.game.rewards[AGENTS[seat]] + bonus
            [advantage] = policy.baselines.advantages([turn.state], [value])
            # Equal sequences have equal gradients: their advantages are added up.
            key = turn.known, turn.draw.tokens
            advantages[key] += advantage / len(games)
            draws[key] = turn.draw
    data = []
    for (known, tokens), draw in draws.items():
        prompt = policy.prompt(known)
        nothing = [0.0] * (len(prompt) - 1)
        data.append(
            _datum(
                [*prompt, *tokens],
                logprobs=[*nothing, *draw.logprobs],
                advantages=[*nothing, *[advantages[known, tokens]] * len(tokens)],
            )
        )
    # Without its moments and with an epsilon of one, Adam is gradient descent.
    adam = AdamParams(
        learning_rate=LEARNING_RATE * (1.0 - 2.0 / 3.0 * share_done), beta1=0.0, eps=1.0
    )
    policy.run.forward_backward(data, "importance_sampling")
    await policy.run.optim_step(adam).result_async()


async def learn(policies: Sequence[Policy]) -> None:
    """Let two policies learn the game from each other."""
    for step in range(NUM_WARM_STEPS):
        await asyncio.gather(*(imitate(each, seat, step) for seat, each in enumerate(policies)))
    for step in range(NUM_STEPS):

        def answer(
            seat: int, known: str, number: int, step: int = step
        ) -> Awaitable[Sequence[Draw]]:
            return policies[seat].draw(known, number, step)

        games = await play(answer, NUM_GAMES)
        assert all(sum(each.game.rewards.values()) == 0.0 for each in games)
        if step >= NUM_STEPS / 3:
            for seat, policy in enumerate(policies):
                policy.note_strategy(games, seat, weight=step + 1.0)
        await asyncio.gather(
            *(improve(each, games, seat, step) for seat, each in enumerate(policies))
        )


def _datum(sequence: Sequence[int], **values: Sequence[float]) -> Datum:
    """Return a sequence to train on, with a value of each target."""
    return Datum(ModelInput.from_ints(sequence[:-1]), {"target_tokens": sequence[1:], **values})


@pytest.mark.timeout(3600)
def test_kuhn_poker_is_learned_to_its_value(embedded: Deployment) -> None:
    with embedded.client() as client:
        policies = [Policy.of(client) for _ in AGENTS]
        asyncio.run(learn(policies))
    first, second = (policy.mean_strategy for policy in policies)
    # Each is held against the best answer to it that there is, computed exactly.
    assert -best_response_value(first, seat=1) >= VALUE - 0.03
    assert best_response_value(second, seat=0) <= VALUE + 0.03
