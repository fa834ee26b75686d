"""What an agent read with a picture in it: the sequence that is trained, and the kept one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.pictures import picture

from tinsmith.episodes.types import RecordedTrajectory
from tinsmith.images import ImageRules
from tinsmith.recipes.kept_episodes import to_sample
from tinsmith.recipes.rl_episodes import TrainedSample
from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput

PLACEHOLDER = 99
RULES = ImageRules(PLACEHOLDER, token_side_pixels=28, min_pixels=28 * 28, max_pixels=28 * 28 * 64)
IMAGE = picture(56, 84)
"""Six tokens."""


def recorded() -> RecordedTrajectory:
    return RecordedTrajectory(
        prompt=ModelInput((EncodedTextChunk([1, 2]), IMAGE, EncodedTextChunk([3]))),
        tokens=np.array([4, 5, 6]),
        mask=np.array([1.0, 0.0, 1.0], np.float32),
        logprobs=np.array([-1.0, 0.0, -2.0], np.float32),
        versions=np.array([7, 7, 8]),
        call_indices=(0, 1),
        call_ends=(1, 3),
    )


def test_an_image_is_counted_and_no_token_of_it_is_trained() -> None:
    datum = TrainedSample(recorded(), 0.5, RULES).to_datum()
    image = datum.model_input.chunks[1]
    assert isinstance(image, ImageChunk)
    assert image.expected_tokens == 6
    assert datum.model_input.length == 11
    context = [1, 2, *[PLACEHOLDER] * 6, 3, 4, 5, 6]
    assert list(datum.loss_fn_inputs["target_tokens"]) == context[1:]
    assert list(datum.loss_fn_inputs["advantages"]) == [0.0] * 8 + [0.5, 0.0, 0.5]
    assert list(datum.loss_fn_inputs["logprobs"]) == [0.0] * 8 + [-1.0, 0.0, -2.0]


def test_without_rules_an_image_is_told() -> None:
    with pytest.raises(ValueError, match="give the `images` rules of its model"):
        TrainedSample(recorded(), 0.5).to_datum()


def test_what_is_kept_has_the_image_at_its_place() -> None:
    counts: list[int] = []
    sample = to_sample(recorded(), counts, RULES)
    assert list(sample.tokens) == [1, 2, *[PLACEHOLDER] * 6, 3, 4, 5, 6]
    [placed] = sample.images
    assert (placed.position, placed.num_tokens, placed.image.data) == (2, 6, IMAGE.data)
    assert counts == [1, 1]
