"""Episodes of environments that step on tokens: what is read, trained on and refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rollouts.fakes import (
    CharTokenizer,
    FakeInstance,
    FakeObservation,
    FakeOutcome,
    ScriptedSampler,
    creating,
)

from tinsmith.environments.chat_messages import MAX_SHOWN_TOKENS
from tinsmith.environments.environment import Action
from tinsmith.errors import FieldViolation, InvalidArgumentError
from tinsmith.rollouts import (
    RolloutConfig,
    RolloutRunner,
    SamplerFailedError,
    TerminationReason,
    Trajectory,
    trajectory_arrays,
)
from tinsmith.rollouts.policy_player import PolicyPlayer
from tinsmith.types import SampledSequence

TOKENIZER = CharTokenizer()
END = FakeOutcome(FakeObservation(), 1.0, True)


class NoTemplate(CharTokenizer):
    """The tokenizer of a model without a chat template."""

    chat_template = None

    def render_chat_template(self, *_: Any, **__: Any) -> str:
        raise AssertionError("an episode of tokens has no template")


def tokens(*shown: Any, stop: tuple[str | int, ...] = ()) -> FakeObservation:
    return FakeObservation(tokens=shown, stop=stop)


def playing(
    first: FakeObservation, outcomes: Sequence[FakeOutcome], kinds: frozenset[str] | None
) -> FakeInstance:
    instance = FakeInstance("Q", outcomes)
    instance.observation = first
    if kinds is not None:
        instance.action_kinds = kinds
    return instance


TOKENS = frozenset({"tokens"})
ids = st.lists(st.integers(0, 2) | st.integers(10, 200), min_size=1, max_size=6)
texts = st.text("abc xyz", min_size=1, max_size=5)


@settings(deadline=None)
@given(first=ids, turns=st.lists(st.tuples(texts, st.booleans(), ids), min_size=1, max_size=4))
def test_each_turn_reads_the_exact_tokens_so_far(
    first: list[int], turns: list[tuple[str, bool, list[int]]]
) -> None:
    texts = [text + ("" if is_cut else "<|im_end|>") for text, is_cut, _ in turns]
    sampler = ScriptedSampler(texts, tokenizer=TOKENIZER)
    outcomes = [FakeOutcome(tokens(*shown), 0.5) for _, _, shown in turns[:-1]]
    instance = playing(tokens(*first), [*outcomes, END], TOKENS)
    trajectory = asyncio.run(RolloutRunner(NoTemplate(), sampler).run(creating(instance)))

    said = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    read, mask = list(first), [False] * len(first)
    for number, turn in enumerate(said):
        assert sampler.prompts[number] == read
        shown = turns[number][2] if number < len(turns) - 1 else []
        read += [*turn, *shown]
        mask += [True] * len(turn) + [False] * len(shown)
    (sample,) = trajectory.samples
    assert sample.tokens.tolist() == read
    assert sample.loss_mask.tolist() == mask
    assert instance.actions == [Action(tokens=tuple(turn)) for turn in said]
    (arrays,) = trajectory_arrays(trajectory, 1.0)
    assert arrays.mask.tolist() == [float(each) for each in mask[1:]]
    assert trajectory.reward == 0.5 * (len(turns) - 1) + 1.0
    assert "".join(str(each["content"]) for each in trajectory.messages) == TOKENIZER.decode(read)


async def play(
    first: FakeObservation,
    outcomes: Sequence[FakeOutcome] = (END,),
    kinds: frozenset[str] | None = TOKENS,
    **settings: Any,
) -> tuple[FakeInstance, ScriptedSampler, Trajectory]:
    sampler = ScriptedSampler(["ab<|im_end|>", "c<|im_end|>"], tokenizer=TOKENIZER)
    instance = playing(first, outcomes, kinds)
    runner = RolloutRunner(TOKENIZER, sampler, **settings)
    return instance, sampler, await runner.run(creating(instance))


async def test_messages_may_be_answered_by_tokens() -> None:
    more = FakeOutcome(FakeObservation.user("R"), 0.25)
    instance, sampler, trajectory = await play(FakeObservation.user("Q"), [more, END])
    assert [action.tokens for action in instance.actions if isinstance(action, Action)] == [
        tuple(TOKENIZER.encode(text, add_special_tokens=False))
        for text in ("ab<|im_end|>", "c<|im_end|>")
    ]
    # The context is that of a conversation of text.
    _, of_text, same = await play(FakeObservation.user("Q"), [more, END], None)
    assert sampler.prompts == of_text.prompts
    assert trajectory.messages == same.messages


@pytest.mark.parametrize("kinds", [frozenset({"text", "tokens"}), frozenset({"text"}), None])
async def test_beside_text_it_is_text(kinds: frozenset[str] | None) -> None:
    instance, _, _ = await play(FakeObservation.user("Q"), kinds=kinds)
    assert instance.actions == ["ab"]


async def test_a_parser_of_ones_own_comes_first() -> None:
    instance, _, _ = await play(tokens(50), parse_action=str.upper)
    assert instance.actions == ["AB<|IM_END|>"]


async def test_tokens_say_where_a_turn_ends() -> None:
    _, sampler, trajectory = await play(tokens(50, stop=(7, "\n")))
    assert trajectory.turns[0].stop == ("\n", 7)
    assert sampler.params[0].stop == ["\n", 7]


SHOWS_BOTH = FakeObservation([{"role": "user", "content": "x"}], tokens=(1,))


@pytest.mark.parametrize(
    ("first", "then", "kinds", "problem"),
    [
        (tokens(50), None, None, "shows tokens, and steps on text; set action_kinds"),
        (tokens(50), None, frozenset({"text", "tokens"}), "steps on text and tokens"),
        (tokens(-1), None, TOKENS, "a token is a whole number from 0 to 2147483647, got int -1"),
        (tokens(2**31), None, TOKENS, "got int 2147483648"),
        (tokens(10**9999), None, TOKENS, "a token is a whole number"),
        (tokens(True), None, TOKENS, "got bool"),
        (tokens("a"), None, TOKENS, "got str"),
        (FakeObservation(tokens="ab"), None, TOKENS, "tokens are a list, got str"),  # type: ignore[arg-type]
        (SHOWS_BOTH, None, TOKENS, "shows tokens beside messages, images or tools"),
        (tokens(50), FakeObservation.user("x"), TOKENS, "began with tokens, and now messages"),
        (FakeObservation.user("x"), tokens(50), TOKENS, "began with messages, and now tokens"),
        (tokens(50), FakeObservation(), TOKENS, "shows no message"),
        (tokens(5), None, TOKENS, "the tokenizer cannot read the tokens: chr() arg not in range"),
        (tokens(*[50] * (MAX_SHOWN_TOKENS + 1)), None, TOKENS, "shows 1048577 tokens, at most"),
        (FakeObservation(tokens=np.ones(3)), None, TOKENS, "tokens are a list, got ndarray"),  # type: ignore[arg-type]
        (tokens(50), None, "tokens", "action_kinds is a set, got str"),
        (tokens(50), None, frozenset({"moves"}), "action_kinds holds 'moves'; known are: text"),
        (tokens(50), tokens(*range(50, 350)), TOKENS, "the observation has over 1000 bytes"),
    ],
)
async def test_what_is_no_episode_of_tokens_fails_alone(
    first: FakeObservation,
    then: FakeObservation | None,
    kinds: Any,
    problem: str,
) -> None:
    outcomes = [END] if then is None else [FakeOutcome(then), END]
    config = RolloutConfig(max_observation_bytes=1000)
    instance, _, trajectory = await play(first, outcomes, kinds, config=config)
    assert trajectory.reason is TerminationReason.ENVIRONMENT_FAILED
    assert problem in (trajectory.failure or "")
    assert instance.num_deletes == 1


async def test_an_observation_beyond_the_context_ends_the_episode() -> None:
    config = RolloutConfig(max_context_tokens=10)
    _, _, trajectory = await play(
        tokens(50), [FakeOutcome(tokens(*range(50, 70)), 0.5)], config=config
    )
    assert (trajectory.reason, trajectory.reward) == (TerminationReason.CONTEXT_FULL, 0.5)
    assert trajectory.samples[0].loss_mask[-1]


async def test_many_tokens_are_read_beside_the_event_loop() -> None:
    threads = []

    class Watching(CharTokenizer):
        def decode(self, tokens: Sequence[int]) -> str:
            threads.append(threading.current_thread() is threading.main_thread())
            return super().decode(tokens)

    sampler = ScriptedSampler(["a<|im_end|>"], tokenizer=TOKENIZER)
    config = RolloutConfig(max_context_tokens=10**6)
    instance = playing(tokens(*[50] * 100_000), [END], TOKENS)
    await RolloutRunner(Watching(), sampler, config).run(creating(instance))
    # What the environment showed, and then what the model said.
    assert threads == [False, True]


async def test_a_token_that_the_model_lacks_is_the_environments_fault() -> None:
    class Refusing:
        async def sample_async(self, *_: object) -> SampledSequence:
            wrong = FieldViolation("prompt.chunks[0].tokens", "must be below 300")
            raise InvalidArgumentError("a token is too large", field_violations=[wrong])

    instance = playing(tokens(10**5), [END], TOKENS)
    trajectory = await RolloutRunner(TOKENIZER, Refusing()).run(creating(instance))
    assert trajectory.reason is TerminationReason.ENVIRONMENT_FAILED
    assert "a token is too large" in (trajectory.failure or "")
    # A prompt of text is the client's own.
    with pytest.raises(SamplerFailedError, match="a token is too large"):
        await RolloutRunner(TOKENIZER, Refusing()).run(creating(FakeInstance("Q", [END])))


async def test_a_game_shows_messages() -> None:
    class Shown:
        def observe(self, agent: str) -> Any:
            return tokens(50)

    with pytest.raises(ValueError, match="a game shows messages"):
        await PolicyPlayer(TOKENIZER, ScriptedSampler([], tokenizer=TOKENIZER)).choose_move(
            Shown(), "black"
        )
