"""What `model` may name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith import names
from tinsmith_gateway.openai.text.model_names import (
    BaseModel,
    Checkpoint,
    LatestWeights,
    SavedPath,
    Source,
    candidates,
    latest_of,
)
from tinsmith_gateway.tinker.wire.ids import TinkerPath

RUN = "projects/p/trainingRuns/r"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(
            "Qwen/Qwen3-8B",
            [
                BaseModel("Qwen/Qwen3-8B"),
                Checkpoint("projects/p/trainingRuns/Qwen/checkpoints/Qwen3-8B"),
            ],
            id="base",
        ),
        pytest.param(
            "r/c", [BaseModel("r/c"), Checkpoint(f"{RUN}/checkpoints/c")], id="short-checkpoint"
        ),
        pytest.param("gpt-4o", [BaseModel("tiny")], id="alias"),
        pytest.param("r", [BaseModel("r"), LatestWeights(RUN)], id="bare"),
        pytest.param("r@latest", [LatestWeights(RUN)], id="latest"),
        pytest.param(RUN, [LatestWeights(RUN)], id="run"),
        pytest.param(f"{RUN}@latest", [LatestWeights(RUN)], id="run-latest"),
        pytest.param(f"{RUN}/checkpoints/c", [Checkpoint(f"{RUN}/checkpoints/c")], id="checkpoint"),
        pytest.param(
            "projects/other/trainingRuns/r/checkpoints/c",
            [Checkpoint("projects/other/trainingRuns/r/checkpoints/c")],
            id="published",
        ),
        pytest.param(
            "tinker://s:train:0/weights/c",
            [SavedPath(TinkerPath("s:train:0", "weights", "c"))],
            id="weights",
        ),
        pytest.param(
            "tinker://r/sampler_weights/c",
            [SavedPath(TinkerPath("r", "sampler_weights", "c"))],
            id="sampler-weights",
        ),
        pytest.param(
            "s:train:0",
            [BaseModel("s:train:0"), LatestWeights("projects/p/trainingRuns/s-train-0")],
            id="tinker-run",
        ),
        pytest.param("", [], id="nothing"),
        pytest.param("tinker://r/optimizers/c", [], id="no-kind"),
        pytest.param("tinker://r/weights/../c", [], id="no-path"),
        pytest.param("tinker://../weights/c", [], id="no-run"),
        pytest.param("projects/p/environments/e", [], id="no-model"),
        pytest.param(f"{RUN}/checkpoints/c@latest", [], id="no-live-checkpoint"),
    ],
)
def test_a_name_stands_for_its_sources_in_order(
    model: str, expected: list[Source | SavedPath]
) -> None:
    assert list(candidates(model, project="p", aliases={"gpt-4o": "tiny"})) == expected


@given(st.text())
def test_every_source_has_a_name_that_is_one(model: str) -> None:
    for source in candidates(model, project="p", aliases={}):
        match source:
            case LatestWeights(name):
                assert names.RunName.parse(name)
            case Checkpoint(name):
                assert names.CheckpointName.parse(name)


def test_what_is_listed_is_understood() -> None:
    assert candidates(latest_of(RUN), project="p", aliases={}) == (LatestWeights(RUN),)
