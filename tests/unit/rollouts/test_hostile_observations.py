"""Environments that lie, flood or show what is no picture: their episode is lost, and no other."""

from __future__ import annotations

import asyncio
import struct
import threading
from typing import Any

import numpy as np
import pytest
from tests.fakes.chat_models import QWEN25_VL, TURN_END, chat_tokenizer, image_rules
from tests.fakes.pictures import picture
from tests.unit.rollouts.fakes import FakeInstance, FakeObservation, FakeOutcome, creating

from tinsmith.errors import FieldViolation, InvalidArgumentError
from tinsmith.images import MAX_IMAGES, MAX_PROMPT_PIXELS
from tinsmith.rollouts import (
    RolloutConfig,
    RolloutRunner,
    SamplerFailedError,
    TerminationReason,
    Trajectory,
    trajectory_arrays,
)
from tinsmith.types import ImageChunk, ModelInput, SampledSequence, SamplingParams

TOKENIZER = chat_tokenizer(QWEN25_VL)
CONFIG = RolloutConfig(max_turns=2, max_context_tokens=2**20)
BROKEN = b"no pixels follow"


def png(width: int, height: int) -> ImageChunk:
    """Return the header of a picture, and then nothing that could be decoded."""
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return ImageChunk(header + BROKEN, "png")


def show(*images: Any) -> FakeObservation:
    places: list[Any] = [{"type": "image"} for _ in images]
    return FakeObservation([{"role": "user", "content": places}], list(images))


def say(text: str = "more") -> FakeObservation:
    return FakeObservation.user(text)


def stops(stop: Any) -> FakeObservation:
    return FakeObservation([{"role": "user", "content": "more"}], stop=stop)


class Reader:
    """Says a letter and ends its turn; refuses prompts with a picture that it cannot decode."""

    async def sample_async(self, prompt: ModelInput, params: SamplingParams) -> SampledSequence:
        for chunk in prompt.chunks:
            if isinstance(chunk, ImageChunk) and chunk.data.endswith(BROKEN):
                wrong = FieldViolation("prompt.chunks[1]", "cannot be read as png")
                raise InvalidArgumentError("it is no png", field_violations=[wrong])
        tokens = TOKENIZER.encode(f"a{TURN_END}", add_special_tokens=False)
        return SampledSequence(tokens, [-0.5] * len(tokens), [0] * len(tokens), "stop")


def runner(sampler: Any = None) -> RolloutRunner:
    return RolloutRunner(TOKENIZER, sampler or Reader(), CONFIG, images=image_rules(TOKENIZER))


async def play_beside(step: FakeOutcome) -> tuple[Trajectory, Trajectory]:
    """Play an episode beside a good one; return both, the good one last."""
    good = FakeInstance("Q", [FakeOutcome(show(picture(28, 28)), 0.5), FakeOutcome(say(), 1, True)])
    bad = FakeInstance("Q", [step, FakeOutcome(say(), 1.0, True)])
    plays = runner()
    first, second = await asyncio.gather(plays.run(creating(bad)), plays.run(creating(good)))
    assert (bad.num_deletes, good.num_deletes) == (1, 1)
    return first, second


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (FakeOutcome(say(), float("nan")), "it must be a number from -1e"),
        (FakeOutcome(say(), float("-inf")), "it must be a number from -1e"),
        (FakeOutcome(say(), 1e308), "it must be a number from -1e"),
        (FakeOutcome(say(), 10**400), "it must be a number from -1e"),
        (FakeOutcome(say(), 10**9999), "a int that cannot be shown"),
        (FakeOutcome(say(), "1"), "the reward is '1'"),  # type: ignore[arg-type]
        (FakeOutcome(say(), None), "the reward is None"),  # type: ignore[arg-type]
        (FakeOutcome(say(), 1.0, "no"), "done is 'no'"),  # type: ignore[arg-type]
        (FakeOutcome(say(), 1.0, 0), "done is 0"),
        (FakeOutcome(say(), 1.0, False, "fine"), "info is a mapping"),  # type: ignore[arg-type]
        (FakeOutcome(FakeObservation()), "shows no message"),
        (FakeOutcome(say("x" * 100_000_000)), "the observation has over"),
        (FakeOutcome(stops("now")), "stop is a list, got str"),
        (FakeOutcome(stops([None])), "neither a string nor a token id"),
        (FakeOutcome(stops([True])), "neither a string nor a token id"),
        (FakeOutcome(stops([""])), "a stop string has 1 to 256 characters"),
        (FakeOutcome(stops(["\ud800"])), "a stop string holds half of a surrogate pair"),
        (FakeOutcome(stops(["x" * 257])), "a stop string has 1 to 256 characters"),
        (FakeOutcome(stops(["x"] * 17)), "stop holds 17 strings and 0 token ids, at most 16"),
        (FakeOutcome(stops([1] * 65)), "0 strings and 65 token ids, at most 16 and 64"),
        (FakeOutcome(stops([-1])), "a stop token is a whole number from 0"),
        (FakeOutcome(stops([2**31])), "a stop token is a whole number from 0"),
        (FakeOutcome(show(b"bytes")), "an image is an ImageChunk"),
        (FakeOutcome(show(ImageChunk(b"GIF89a", "gif"))), "use png or jpeg"),
        (FakeOutcome(show(ImageChunk(b"text", "png"))), "png"),
        (FakeOutcome(show(png(0, 5))), "is 0 x 5 pixels"),
        (FakeOutcome(show(png(60_000, 60_000))), "60000 x 60000 pixels, at most"),
        (FakeOutcome(show(png(4_000, 4))), "one side over 200 times the other"),
        (FakeOutcome(show(ImageChunk(bytes(21 << 20), "png"))), "bytes, at most"),
        (FakeOutcome(show(*[picture(28, 28)] * (MAX_IMAGES + 1))), "65 images, at most 64"),
        (FakeOutcome(show(*[png(5_600, 5_600)] * 3)), f"over {MAX_PROMPT_PIXELS} pixels together"),
        (
            FakeOutcome(show(png(28, 28))),
            "refuses a prompt with what the environment showed",
        ),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
async def test_a_hostile_step_loses_its_episode_alone(step: FakeOutcome, problem: str) -> None:
    lost, good = await play_beside(step)
    assert lost.reason is TerminationReason.ENVIRONMENT_FAILED
    assert lost.failure is not None
    assert problem in lost.failure
    with pytest.raises(ValueError, match="must not be trained on"):
        trajectory_arrays(lost, 1.0)
    assert (good.reason, good.reward) == (TerminationReason.DONE, 1.5)


@pytest.mark.parametrize("number", [True, np.float32(0.5), np.bool_(True), 3, -1e9])
async def test_numbers_of_other_libraries_are_rewards(number: Any) -> None:
    play, _ = await play_beside(FakeOutcome(say(), number, np.bool_(True)))  # type: ignore[arg-type]
    assert (play.reason, play.reward) == (TerminationReason.DONE, float(number))


@pytest.mark.parametrize(
    ("field", "images"), [("params.temperature", [picture(28, 28)]), ("prompt.chunks[0]", [])]
)
async def test_what_is_refused_of_every_episode_is_no_fault_of_the_environment(
    field: str, images: list[ImageChunk]
) -> None:
    class Refusing:
        async def sample_async(self, *_: object) -> SampledSequence:
            wrong = FieldViolation(field, "must be another")
            raise InvalidArgumentError(f"{field} is wrong", field_violations=[wrong])

    instance = FakeInstance("Q", [])
    instance.observation = show(*images) if images else say()
    with pytest.raises(SamplerFailedError, match="is wrong"):
        await runner(Refusing()).run(creating(instance))


async def test_a_long_text_is_read_beside_the_event_loop() -> None:
    threads = []

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            threads.append((len(text) > 2**16, threading.current_thread()))
            return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)

    instance = FakeInstance("Q", [FakeOutcome(say("x " * 2**16)), FakeOutcome(say(), 1, True)])
    plays = RolloutRunner(Watching(), Reader(), CONFIG, images=image_rules(TOKENIZER))
    assert (await plays.run(creating(instance))).reward == 1.0
    main = threading.main_thread()
    assert {is_long for is_long, thread in threads if thread is not main} == {True}
    assert not any(is_long for is_long, thread in threads if thread is main)
