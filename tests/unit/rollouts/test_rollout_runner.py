from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.unit.rollouts.fakes import (
    CharTokenizer,
    FakeInstance,
    FakeObservation,
    FakeOutcome,
    ScriptedSampler,
    ThinkingTokenizer,
    creating,
)

from tinsmith.rollouts import (
    ActionParseError,
    RolloutConfig,
    RolloutRunner,
    SamplerFailedError,
    TemplateRewritesHistoryError,
    TerminationReason,
    trajectory_arrays,
    trajectory_datums,
)
from tinsmith.rpc.codec import encode_sampling_params
from tinsmith.sampling_stops import with_stop
from tinsmith.types import SamplingParams

TOKENIZER = CharTokenizer()


def outcome(text: str, reward: float = 0.0, **fields: Any) -> FakeOutcome:
    return FakeOutcome(FakeObservation.user(text), reward, **fields)


END = FakeOutcome(FakeObservation(), 1.0, True, {"correct": True})


async def test_a_multi_turn_episode_to_the_last_bit() -> None:
    sampler = ScriptedSampler(["ab<|im_end|>", "cde", "f<|im_end|>"], tokenizer=TOKENIZER)
    instance = FakeInstance("Q", [outcome("R", 0.25), outcome("S", 0.5), END])
    runner = RolloutRunner(TOKENIZER, sampler, RolloutConfig(max_tokens_per_turn=3))

    trajectory = await runner.run(creating(instance))

    pieces = [
        ("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n", -1),
        ("ab<|im_end|>", 0),
        ("\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n", -1),
        ("cde", 1),
        ("<|im_end|>\n<|im_start|>user\nS<|im_end|>\n<|im_start|>assistant\n", -1),
        ("f<|im_end|>", 2),
    ]
    tokens: list[int] = []
    turns: list[int] = []
    for text, turn in pieces:
        encoded = TOKENIZER.encode(text, add_special_tokens=False)
        if turn >= 0:
            assert sampler.prompts[turn] == tokens
        tokens += encoded
        turns += [turn] * len(encoded)
    (sample,) = trajectory.samples
    mask = np.asarray(turns) >= 0
    assert sample.tokens.tolist() == tokens
    assert sample.loss_mask.tolist() == mask.tolist()
    assert sample.turn_indices.tolist() == turns
    assert sample.logprobs[mask].tolist() == [
        -1.0, -1.0625, -1.125, -2.0, -2.0625, -2.125, -3.0, -3.0625,
    ]  # fmt: skip
    assert not sample.logprobs[~mask].any()
    assert sample.versions.tolist() == [turn + 3 if turn >= 0 else -1 for turn in turns]
    assert instance.actions == ["ab", "cde", "f"]
    assert instance.num_deletes == 1
    assert trajectory.reason is TerminationReason.DONE
    assert trajectory.reward == 1.75
    assert trajectory.num_truncated_turns == 1
    assert trajectory.version_range == (3, 5)
    assert trajectory.turns[-1].info == {"correct": True}
    assert [message["content"] for message in trajectory.messages] == [
        "Q", "ab", "R", "cde", "S", "f",
    ]  # fmt: skip

    (arrays,) = trajectory_arrays(trajectory, 0.5)
    assert arrays.tokens == tokens[:-1]
    assert arrays.target_tokens.tolist() == tokens[1:]
    assert arrays.mask.tolist() == mask[1:].astype(float).tolist()
    assert arrays.advantages.tolist() == (0.5 * mask[1:]).tolist()
    assert arrays.logprobs.tolist() == sample.logprobs[1:].tolist()
    (by_turn,) = trajectory_arrays(trajectory, [1.0, 2.0, 3.0])
    assert by_turn.advantages.tolist() == [turn + 1.0 if turn >= 0 else 0.0 for turn in turns[1:]]
    (datum,) = trajectory_datums(trajectory, 0.5)
    assert datum.model_input.to_ints() == tokens[:-1]
    assert set(datum.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}
    assert datum.loss_fn_inputs["target_tokens"].dtype == np.int64


async def test_split_turns_train_each_turn_in_the_context_it_was_sampled_in() -> None:
    tokenizer = ThinkingTokenizer()
    sampler = ScriptedSampler(
        ["hm</think>a<|im_end|>", "oh</think>b<|im_end|>"], tokenizer=tokenizer
    )
    runner = RolloutRunner(tokenizer, sampler, RolloutConfig(split_turns=True))
    trajectory = await runner.run(creating(FakeInstance("Q", [outcome("R"), END])))
    assert len(trajectory.samples) == 2
    for sample, prompt in zip(trajectory.samples, sampler.prompts, strict=True):
        num_context = int((~sample.loss_mask).sum())
        assert sample.tokens[:num_context].tolist() == prompt
        assert sample.loss_mask[num_context:].all()
    assert len(trajectory_datums(trajectory, 1.0)) == 2


async def test_a_rewriting_template_stops_the_run_and_frees_the_instance() -> None:
    tokenizer = ThinkingTokenizer()
    sampler = ScriptedSampler(["hm</think>a<|im_end|>"], tokenizer=tokenizer)
    instance = FakeInstance("Q", [outcome("R")])
    with pytest.raises(TemplateRewritesHistoryError):
        await RolloutRunner(tokenizer, sampler).run(creating(instance))
    assert instance.num_deletes == 1


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(RuntimeError("boom"), id="raises"),
        pytest.param(outcome("R", float("nan")), id="nan-reward"),
    ],
)
async def test_a_failed_environment_is_an_outcome_that_can_not_be_trained_on(
    problem: FakeOutcome | Exception,
) -> None:
    sampler = ScriptedSampler(["a<|im_end|>"], tokenizer=TOKENIZER)
    instance = FakeInstance("Q", [problem])
    trajectory = await RolloutRunner(TOKENIZER, sampler).run(creating(instance))
    assert trajectory.reason is TerminationReason.ENVIRONMENT_FAILED
    assert trajectory.failure
    assert instance.num_deletes == 1
    with pytest.raises(ValueError, match="must not be trained on"):
        trajectory_arrays(trajectory, 1.0)


async def test_an_instance_that_can_not_be_created_is_a_failed_environment() -> None:
    async def create() -> FakeInstance:
        raise RuntimeError("no room")

    sampler = ScriptedSampler([], tokenizer=TOKENIZER)
    trajectory = await RolloutRunner(TOKENIZER, sampler).run(create)
    assert trajectory.reason is TerminationReason.ENVIRONMENT_FAILED
    assert trajectory.failure == "RuntimeError: no room"


async def test_a_failed_sampler_is_raised() -> None:
    sampler = ScriptedSampler([RuntimeError("gone")], tokenizer=TOKENIZER)
    instance = FakeInstance("Q", [])
    with pytest.raises(SamplerFailedError, match="gone"):
        await RolloutRunner(TOKENIZER, sampler).run(creating(instance))
    assert instance.num_deletes == 1


async def test_an_unreadable_action_ends_the_episode_with_its_reward() -> None:
    def parse(text: str) -> str:
        raise ActionParseError("no tool call")

    sampler = ScriptedSampler(["a<|im_end|>"], tokenizer=TOKENIZER)
    config = RolloutConfig(parse_error_reward=-0.5)
    runner = RolloutRunner(TOKENIZER, sampler, config, parse_action=parse)
    trajectory = await runner.run(creating(FakeInstance("Q", [])))
    assert trajectory.reason is TerminationReason.PARSE_ERROR
    assert trajectory.reward == -0.5
    assert len(trajectory_arrays(trajectory, 1.0)) == 1


async def test_a_cancelled_run_frees_its_instance() -> None:
    class HangingSampler:
        async def sample_async(self, prompt_tokens: object, params: object) -> Any:
            await asyncio.Event().wait()

    instance = FakeInstance("Q", [])
    run = asyncio.create_task(RolloutRunner(TOKENIZER, HangingSampler()).run(creating(instance)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert instance.num_deletes == 1


async def test_a_run_that_is_asked_to_stop_is_cancelled() -> None:
    sampler = ScriptedSampler(["a<|im_end|>"], tokenizer=TOKENIZER)
    instance = FakeInstance("Q", [])
    trajectory = await RolloutRunner(TOKENIZER, sampler).run(
        creating(instance), should_stop=lambda: len(sampler.prompts) == 1
    )
    assert trajectory.reason is TerminationReason.CANCELLED
    assert instance.actions == []


async def test_seeds_differ_by_turn_and_episode_and_repeat() -> None:
    async def seeds(key: str, seed: int | None) -> list[int | None]:
        sampler = ScriptedSampler(["a<|im_end|>", "b<|im_end|>"], tokenizer=TOKENIZER)
        runner = RolloutRunner(TOKENIZER, sampler, params=SamplingParams(seed=seed))
        await runner.run(creating(FakeInstance("Q", [outcome("R"), END])), episode_key=key)
        return [params.seed for params in sampler.params]

    first = await seeds("0/0", 7)
    assert len({*first, *await seeds("0/1", 7)}) == 4
    assert await seeds("0/0", 7) == first
    assert await seeds("0/0", None) == [None, None]


async def test_an_environment_says_where_a_turn_ends() -> None:
    """A line break ends the first turn, a token the third; the second ends as the model wants."""
    comma = TOKENIZER.encode(",", add_special_tokens=False)
    first = FakeObservation([{"role": "user", "content": "Q"}], stop=("\n",))
    last = FakeObservation([{"role": "user", "content": "S"}], stop=(*comma, "!"))
    instance = FakeInstance("", [outcome("R"), FakeOutcome(last), END])
    instance.observation = first
    sampler = ScriptedSampler(["ab\n", "c<|im_end|>", "d,"], tokenizer=TOKENIZER, stops="\n,")
    runner = RolloutRunner(TOKENIZER, sampler)

    trajectory = await runner.run(creating(instance))

    asked = [(params.stop, params.keeps_turn_end) for params in sampler.params]
    assert asked == [(["\n"], True), (None, None), (["!", *comma], True)]
    assert instance.actions == ["ab\n", "c", "d,"]
    # A line break is no end of a turn: the model did not say the token before it.
    pieces = [
        ("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n", -1),
        ("ab\n", 0),
        ("<|im_end|>\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n", -1),
        ("c<|im_end|>", 1),
        ("\n<|im_start|>user\nS<|im_end|>\n<|im_start|>assistant\n", -1),
        ("d,", 2),
    ]
    [sample] = trajectory.samples
    assert TOKENIZER.decode(sample.tokens.tolist()) == "".join(text for text, _ in pieces)
    assert sample.turn_indices.tolist() == [turn for text, turn in pieces for _ in encoded(text)]
    assert [turn.stop for turn in trajectory.turns] == [("\n",), (), ("!", *comma)]
    assert [turn.stop_reason for turn in trajectory.turns] == ["stop"] * 3


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("own", "stop", "keeps_turn_end"),
    [
        (None, [7, "x"], True),
        ("a", ["a", 7, "x"], True),
        (["a"], ["a", 7, "x"], True),
        ([], [7, "x"], False),
        ([3], [3, 7, "x"], False),
        (["a", 3], ["a", 3, 7, "x"], False),
    ],
)
def test_stops_of_an_environment_stand_beside_those_of_the_caller(
    own: Any, stop: list[Any], keeps_turn_end: bool
) -> None:
    params = with_stop(SamplingParams(stop=own, temperature=0.5), (7, "x"))
    assert params == SamplingParams(stop=stop, temperature=0.5, keeps_turn_end=keeps_turn_end)
    for said in (True, False):
        kept = SamplingParams(stop=own, keeps_turn_end=said)
        assert with_stop(kept, (7, "x")).keeps_turn_end is said
        assert with_stop(kept, ()) is kept


def test_without_an_end_of_turn_the_strings_of_an_environment_bring_none() -> None:
    """Strings alone in `stop` leave the model's end of turn; `[]` of the caller goes on to hold."""
    message = encode_sampling_params(with_stop(SamplingParams(stop=[]), ("x",)), seed=1)
    assert list(message.stop_strings) == ["x"]
    assert message.HasField("stop_tokens")
    assert not message.stop_tokens.token_ids
    assert not message.stop_tokens.includes_those_of_model


@pytest.mark.parametrize("has_none", [False, True])
async def test_an_observation_of_a_class_without_stop_is_played(has_none: bool) -> None:
    class Shown:
        def __init__(self, content: str) -> None:
            if has_none:
                self.stop = None
            self.messages = [{"role": "user", "content": content}]
            self.images: list[Any] = []
            self.tools: list[Any] = []

    instance = FakeInstance("", [FakeOutcome(Shown("R")), END])  # type: ignore[arg-type]
    instance.observation = Shown("Q")  # type: ignore[assignment]
    sampler = ScriptedSampler(["a<|im_end|>", "b<|im_end|>"], tokenizer=TOKENIZER)

    trajectory = await RolloutRunner(TOKENIZER, sampler).run(creating(instance))

    assert trajectory.reason is TerminationReason.DONE
    assert [turn.stop for turn in trajectory.turns] == [(), ()]
    assert [params.stop for params in sampler.params] == [None, None]
