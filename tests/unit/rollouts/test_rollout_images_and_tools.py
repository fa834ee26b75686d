"""Images and calls of tools in episodes: the exact prefix, and loss on sampled tokens alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.chat_models import (
    IMAGE,
    QWEN3,
    QWEN3_VL,
    QWEN25_VL,
    TURN_END,
    chat_tokenizer,
    image_rules,
)
from tests.fakes.pictures import picture
from tests.unit.rollouts.fakes import FakeInstance, FakeObservation, FakeOutcome, creating

import tinsmith
from tinsmith.environments.environment import Action
from tinsmith.rollouts import (
    ChatTemplateError,
    RolloutConfig,
    RolloutRunner,
    Trajectory,
    trajectory_arrays,
)
from tinsmith.types import ImageChunk, ModelInput, SampledSequence, SamplingParams

words = st.text(st.characters(codec="ascii", exclude_characters="<|>"), max_size=8)
pictures = st.builds(
    picture, st.sampled_from((20, 28, 60)), st.sampled_from((28, 90)), st.integers(0, 3)
)
parts = st.lists(
    st.one_of(words.map(lambda text: {"type": "text", "text": text}), pictures), max_size=4
)
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "computes",
        "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}},
    },
}


@dataclass
class Turn:
    """What the model says, whether it ends its turn, and what is shown then."""

    text: str
    is_cut: bool
    shown: FakeObservation


def observe(role: str, content: Sequence[Any]) -> FakeObservation:
    images = [part for part in content if isinstance(part, ImageChunk)]
    shaped: list[Any] = [
        {"type": "image"} if isinstance(part, ImageChunk) else part for part in content
    ]
    return FakeObservation([{"role": role, "content": shaped}], images)


class Saying:
    """Says the texts of turns letter by letter, and keeps what it read."""

    def __init__(self, tokenizer: tinsmith.Tokenizer, turns: Sequence[Turn]) -> None:
        self.prompts: list[ModelInput] = []
        self.said: list[list[int]] = []
        self._tokenizer = tokenizer
        self._turns = turns

    async def sample_async(self, prompt: ModelInput, params: SamplingParams) -> SampledSequence:
        turn = self._turns[len(self.prompts)]
        encode = self._tokenizer.encode
        tokens = [token for x in turn.text for token in encode(x, add_special_tokens=False)]
        if not turn.is_cut or not tokens:
            tokens += encode(TURN_END, add_special_tokens=False)
        self.prompts.append(prompt)
        self.said.append(tokens)
        is_cut = turn.is_cut and bool(turn.text)
        return SampledSequence(
            tokens, [-0.5] * len(tokens), [3] * len(tokens), "length" if is_cut else "stop"
        )


def play(
    template: str, first: FakeObservation, turns: Sequence[Turn]
) -> tuple[Saying, FakeInstance, Trajectory]:
    tokenizer = chat_tokenizer(template)
    sampler = Saying(tokenizer, turns)
    last = len(turns) - 1
    instance = FakeInstance("", [FakeOutcome(t.shown, 1.0, i == last) for i, t in enumerate(turns)])
    instance.observation = first
    rules = None if tokenizer.image_token_id is None else image_rules(tokenizer)
    runner = RolloutRunner(
        tokenizer, sampler, RolloutConfig(max_context_tokens=100_000), images=rules
    )
    return sampler, instance, asyncio.run(runner.run(creating(instance)))


def flat(value: ModelInput) -> list[Any]:
    """Return a prompt as one entry for each token; an image stands in each of its tokens."""
    entries: list[Any] = []
    for chunk in value.chunks:
        if isinstance(chunk, ImageChunk):
            assert chunk.expected_tokens is not None
            entries += [(chunk.data, index) for index in range(chunk.expected_tokens)]
        else:
            entries += chunk.tokens
    return entries


def check(sampler: Saying, trajectory: Trajectory) -> None:
    """Hold a trajectory against what the model read and said."""
    (sample,) = trajectory.samples
    entries = flat(sample.model_input)
    assert len(entries) == len(sample.tokens)
    expected_mask = [False] * len(entries)
    for prompt, said in zip(sampler.prompts, sampler.said, strict=True):
        read = flat(prompt)
        assert entries[: len(read) + len(said)] == [*read, *said]
        expected_mask[len(read) : len(read) + len(said)] = [True] * len(said)
    assert sample.loss_mask.tolist() == expected_mask
    assert not any(m and isinstance(e, tuple) for m, e in zip(expected_mask, entries, strict=True))
    (arrays,) = trajectory_arrays(trajectory, 2.0)
    assert flat(arrays.model_input) == entries[:-1]
    assert arrays.advantages.tolist() == [2.0 * trained for trained in expected_mask[1:]]
    datum = arrays.to_datum()
    assert datum.model_input.length == len(entries) - 1
    assert all(len(value) == len(entries) - 1 for value in datum.loss_fn_inputs.values())


def rendered(template: str, trajectory: Trajectory, tools: Sequence[Any] = ()) -> str:
    return chat_tokenizer(template).render_chat_template(
        trajectory.messages[:-1], add_generation_prompt=True, tools=list(tools) or None
    )


@pytest.mark.parametrize("template", [QWEN25_VL, QWEN3_VL])
@settings(deadline=None, max_examples=40)
@given(
    first=parts.filter(bool),
    turns=st.lists(st.tuples(words, st.booleans(), parts), min_size=1, max_size=3),
)
def test_each_turn_reads_the_exact_prefix_with_images(
    template: str, first: list[Any], turns: list[tuple[str, bool, list[Any]]]
) -> None:
    script = [Turn(text, is_cut, observe("user", shown)) for text, is_cut, shown in turns]
    sampler, _, trajectory = play(template, observe("user", first), script)

    check(sampler, trajectory)
    # What the last turn read is the template of the conversation, an image for each place.
    tokenizer = chat_tokenizer(template)
    read = [
        tokenizer.encode(IMAGE, add_special_tokens=False)
        if isinstance(chunk, ImageChunk)
        else list(chunk.tokens)
        for chunk in sampler.prompts[-1].chunks
    ]
    assert tokenizer.decode([token for piece in read for token in piece]) == rendered(
        template, trajectory
    )


calls = st.builds(
    lambda text, expression: (
        f"{text}<tool_call>\n"
        + json.dumps({"name": "calculate", "arguments": {"sum": expression}})
        + "\n</tool_call>"
    ),
    words,
    words,
)


@pytest.mark.parametrize("template", [QWEN3, QWEN3_VL])
@settings(deadline=None, max_examples=40)
@given(turns=st.lists(st.tuples(st.one_of(words, calls), words, words), min_size=1, max_size=3))
def test_each_turn_reads_the_exact_prefix_with_tools(
    template: str, turns: list[tuple[str, str, str]]
) -> None:
    script = [
        Turn(
            text,
            False,
            FakeObservation(
                [
                    {"role": "tool", "content": one},
                    {"role": "tool", "content": two, "tool_call_id": "call_0"},
                ]
            ),
        )
        for text, one, two in turns
    ]
    first = FakeObservation([{"role": "user", "content": "go"}], tools=[CALCULATOR])
    sampler, instance, trajectory = play(template, first, script)

    check(sampler, trajectory)
    for (text, _, _), action in zip(turns, instance.actions, strict=True):
        assert isinstance(action, Action)
        before, mark, call = text.partition("<tool_call>\n")
        assert action.text == before.removesuffix("\n" if mark else "")
        assert [(c.name, c.id) for c in action.tool_calls] == [("calculate", "call_0")] * bool(mark)
        if mark:
            body = json.loads(call.removesuffix("\n</tool_call>"))
            assert action.tool_calls[0].read_arguments() == body["arguments"]
    text = chat_tokenizer(template).decode(sampler.prompts[-1].to_ints())
    assert text == rendered(template, trajectory, [CALCULATOR])
    assert '"name": "calculate"' in text


@settings(deadline=None, max_examples=40)
@given(
    first=parts.filter(bool),
    turns=st.lists(
        st.tuples(st.one_of(words, calls), st.booleans(), parts), min_size=1, max_size=3
    ),
)
def test_each_turn_reads_the_exact_prefix_with_images_and_tools(
    first: list[Any], turns: list[tuple[str, bool, list[Any]]]
) -> None:
    script = [Turn(text, is_cut, observe("tool", shown)) for text, is_cut, shown in turns]
    begin = observe("user", first)
    begin.tools = [CALCULATOR]
    sampler, _, trajectory = play(QWEN3_VL, begin, script)

    check(sampler, trajectory)
    shown = [part for part in first if isinstance(part, ImageChunk)]
    # What follows the last turn is not part of the episode.
    shown += [part for _, _, parts in turns[:-1] for part in parts if isinstance(part, ImageChunk)]
    assert [placed.image.data for placed in trajectory.samples[0].images] == [
        image.data for image in shown
    ]


def test_a_tool_may_answer_with_an_image() -> None:
    image = picture(56, 28)
    answer = FakeObservation(
        [{"role": "tool", "content": [{"type": "image"}]}],
        [image],
    )
    call = '<tool_call>{"name": "calculate", "arguments": {}}</tool_call>'
    first = FakeObservation([{"role": "user", "content": "go"}], tools=[CALCULATOR])
    script = [Turn(call, False, answer), Turn("done", False, FakeObservation())]
    sampler, instance, trajectory = play(QWEN3_VL, first, script)

    check(sampler, trajectory)
    (placed,) = trajectory.samples[0].images
    assert (placed.num_tokens, placed.image.data) == (2, image.data)
    assert instance.actions == [
        Action("", tool_calls=instance.actions[0].tool_calls),
        Action("done"),
    ]


def test_images_without_a_place_stand_before_the_first_text() -> None:
    first = FakeObservation([{"role": "user", "content": "How many?"}], [picture(28, 28)])
    sampler, _, trajectory = play(QWEN25_VL, first, [Turn("3", False, FakeObservation())])
    check(sampler, trajectory)
    assert trajectory.messages[0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "How many?"},
    ]


def test_a_placeholder_that_the_model_wrote_is_no_image() -> None:
    tokenizer = chat_tokenizer(QWEN25_VL)
    place = tokenizer.image_token_id
    assert place is not None

    class Confused(Saying):
        async def sample_async(self, prompt: ModelInput, params: SamplingParams) -> SampledSequence:
            await super().sample_async(prompt, params)
            tokens = [place, *self.said[-1]]
            self.said[-1] = tokens
            return SampledSequence(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")

    turns = [Turn("a", False, observe("user", [])), Turn("b", False, FakeObservation())]
    sampler = Confused(tokenizer, turns)
    instance = FakeInstance("q", [FakeOutcome(turns[0].shown), FakeOutcome(FakeObservation(), 1.0)])
    config = RolloutConfig(max_turns=2)
    runner = RolloutRunner(tokenizer, sampler, config, images=image_rules(tokenizer))
    trajectory = asyncio.run(runner.run(creating(instance)))
    check(sampler, trajectory)
    assert instance.actions == ["a", "b"]
    assert trajectory.samples[0].images == ()


@pytest.mark.parametrize(
    ("template", "first", "problem"),
    [
        pytest.param(
            QWEN3,
            FakeObservation([{"role": "user", "content": "q"}], [picture(28, 28)]),
            "reads none",
            id="images-of-a-model-that-reads-none",
        ),
        pytest.param(
            QWEN25_VL,
            FakeObservation([{"role": "user", "content": "q"}], tools=[CALCULATOR]),
            r"tools\.0 leaves no trace",
            id="tools-of-a-model-that-knows-none",
        ),
    ],
)
def test_what_the_model_cannot_do_ends_the_batch(
    template: str, first: FakeObservation, problem: str
) -> None:
    with pytest.raises(ChatTemplateError, match=problem):
        play(template, first, [Turn("a", False, FakeObservation())])
