"""Batches that name recorded samples: what was drawn is marked, and nothing else passes for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith.tensors import decode_tensor, encode_tensor, encode_tokens
from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_gateway.project_threads import ProjectThreads
from tinsmith_gateway.store.tables import STORE
from tinsmith_gateway.tinker import wire_pb2
from tinsmith_gateway.tinker.promises.future_store import FutureStore
from tinsmith_gateway.tinker.sampling.recordings import Recordings
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.sql import open_store

FUTURE = "sample.s-sample-0.3"
FIRST, SECOND = f"{FUTURE}.0", f"{FUTURE}.1"
PROMPT, DRAWN = [5, 6, 7], {FIRST: [10, 11, 12], SECOND: [20, 21]}
LOGPROBS = {FIRST: [-0.25, -0.5, -0.75], SECOND: [-1.0, -2.0]}
TARGETS = [6, 7, *DRAWN[FIRST]]

Change = Callable[["Batch"], Any]


class Batch:
    """A datum of the first sequence as a client sends it."""

    def __init__(self) -> None:
        self.model_id = "s:train:1"
        self.inputs = [*PROMPT, *DRAWN[FIRST][:2]]
        self.images = 0
        self.arrays: dict[str, Any] = {
            "target_tokens": np.array(TARGETS),
            "logprobs": np.array([0.0, 0.0, *LOGPROBS[FIRST]], np.float32),
            "advantages": np.array([0.0, 0.0, 1.0, 1.0, 1.0], np.float32),
        }
        self.input_spans = [prompt(FIRST, 0, 3), sampled(FIRST, 0, 2)]
        self.target_spans = [prompt(FIRST, 1, 2), sampled(FIRST, 0, 3)]

    async def check(self, recordings: Recordings, project: str = "p") -> list[float]:
        """Return the mask that the datum is given."""
        sent = wire_pb2.Datum(
            model_input_spans=self.input_spans, loss_fn_input_spans=self.target_spans
        )
        datum = trajectories_pb2.Datum()
        datum.model_input.chunks.add(tokens=encode_tokens(self.inputs))
        for _ in range(self.images):
            datum.model_input.chunks.add().image.SetInParent()
        for name, array in self.arrays.items():
            datum.loss_inputs[name].CopyFrom(encode_tensor(array))
        request = wire_pb2.ForwardBackwardRequest(model_id=self.model_id, data=[sent])
        await recordings.check(project, request, [datum])
        mask: list[float] = decode_tensor(datum.loss_inputs["sampled_mask"]).tolist()
        return mask


def run(name: str, offset: int, length: int) -> wire_pb2.TokenRun:
    return wire_pb2.TokenRun(sequence_id=name, offset=offset, length=length)


def prompt(name: str, offset: int, length: int) -> wire_pb2.ProvenanceSpan:
    return wire_pb2.ProvenanceSpan(prompt_tokens=run(name, offset, length))


def sampled(name: str, offset: int, length: int) -> wire_pb2.ProvenanceSpan:
    return wire_pb2.ProvenanceSpan(sampled_tokens=run(name, offset, length))


def model_input(*, has_image: bool = False) -> trajectories_pb2.ModelInput:
    made = trajectories_pb2.ModelInput()
    made.chunks.add(tokens=encode_tokens(PROMPT[:1]))
    made.chunks.add(tokens=encode_tokens(PROMPT[1:]))
    if has_image:
        made.chunks.add().image.SetInParent()
    return made


async def keep(recordings: Recordings, *, has_image: bool = False) -> None:
    response = sampler_pb2.SampleResponse()
    for name, tokens in DRAWN.items():
        response.sequences.add(
            tokens=encode_tokens(tokens),
            logprobs=encode_tensor(np.array(LOGPROBS[name], np.float32)),
        )
    asked = model_input(has_image=has_image)
    await recordings.keep("p", "projects/p/samplingSessions/s-sample-0", FUTURE, asked, response)


@pytest.fixture
async def recordings(tmp_path: Path) -> AsyncIterator[Recordings]:
    database = await open_store(STORE, tmp_path)
    yield Recordings(FutureStore(database), ProjectThreads())
    await database.close()


async def test_sampled_targets_are_marked(recordings: Recordings) -> None:
    await keep(recordings)
    assert await Batch().check(recordings) == [0, 0, 1, 1, 1]


async def test_a_datum_is_made_of_several_sequences(recordings: Recordings) -> None:
    await keep(recordings)
    batch = Batch()
    batch.inputs = [*PROMPT, *DRAWN[FIRST], *DRAWN[SECOND][:1]]
    batch.input_spans = [prompt(SECOND, 0, 3), sampled(FIRST, 0, 3), sampled(SECOND, 0, 1)]
    batch.target_spans = [prompt(FIRST, 1, 2), sampled(FIRST, 0, 3), sampled(SECOND, 0, 2)]
    batch.arrays = {
        "target_tokens": np.array([*TARGETS, *DRAWN[SECOND]]),
        "logprobs": np.array([9, 9, *LOGPROBS[FIRST], *LOGPROBS[SECOND]], np.float32),
        "advantages": np.array([0] * 2 + [1] * 5, np.float32),
    }
    assert await batch.check(recordings) == [0, 0, 1, 1, 1, 1, 1]


async def test_log_probabilities_may_be_rounded_by_their_client(recordings: Recordings) -> None:
    await keep(recordings)
    batch = Batch()
    batch.arrays["logprobs"] = batch.arrays["logprobs"] + np.float32(5e-6)
    assert await batch.check(recordings) == [0, 0, 1, 1, 1]


async def test_the_targets_alone_are_compared_where_a_prompt_has_images(
    recordings: Recordings,
) -> None:
    await keep(recordings, has_image=True)
    batch = Batch()
    # Without the image in the datum: of the recorded prompt no token is known.
    batch.inputs[0] = 99
    assert await batch.check(recordings) == [0, 0, 1, 1, 1]
    batch.inputs[-1] = 99
    with pytest.raises(InvalidFieldError, match="holds tokens that"):
        await batch.check(recordings)
    batch.images, batch.input_spans = 1, []
    assert await batch.check(recordings) == [0, 0, 1, 1, 1]
    batch.arrays["target_tokens"][-1] = 99
    with pytest.raises(InvalidFieldError, match="did not draw"):
        await batch.check(recordings)


def _spans(name: str, *spans: wire_pb2.ProvenanceSpan) -> Change:
    return lambda batch: setattr(batch, name, list(spans))


def _array(name: str, index: int, value: float) -> Change:
    return lambda batch: batch.arrays[name].__setitem__(index, value)


TARGET_SPANS, INPUT_SPANS = "data[0].loss_fn_input_spans", "data[0].model_input_spans"


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        pytest.param(
            _array("target_tokens", 2, 99), TARGET_SPANS, "did not draw", id="another-target"
        ),
        pytest.param(
            _array("logprobs", 4, -0.7501),
            "data[0].loss_fn_inputs.logprobs",
            "differ from those",
            id="other-logprobs",
        ),
        pytest.param(
            _array("advantages", 1, -1.0),
            "data[0].loss_fn_inputs.advantages",
            "must be 0",
            id="an-advantage-of-the-prompt",
        ),
        pytest.param(
            lambda batch: batch.arrays.pop("logprobs"),
            "data[0].loss_fn_inputs.logprobs",
            "is required",
            id="no-logprobs",
        ),
        pytest.param(
            lambda batch: batch.arrays.update(advantages=np.zeros(4, np.float32)),
            "data[0].loss_fn_inputs.advantages",
            "one value for each target",
            id="too-few-advantages",
        ),
        pytest.param(
            lambda batch: batch.arrays.update(advantages=np.zeros((5, 1), np.float32)),
            "data[0].loss_fn_inputs.advantages",
            "one value for each target",
            id="advantages-in-rows",
        ),
        pytest.param(_spans("target_spans"), TARGET_SPANS, "must name the sampled", id="no-spans"),
        pytest.param(
            _spans("target_spans", sampled(FIRST, 0, 3), wire_pb2.ProvenanceSpan()),
            TARGET_SPANS,
            "must name the sampled",
            id="a-span-of-nothing",
        ),
        pytest.param(
            _spans("target_spans", sampled(FIRST, 0, 3)), TARGET_SPANS, "cover 5", id="a-gap"
        ),
        pytest.param(
            _spans("target_spans", prompt(FIRST, 1, 6), sampled(FIRST, 0, -1)),
            TARGET_SPANS,
            "cover 5",
            id="backwards",
        ),
        pytest.param(
            _spans("target_spans", prompt(FIRST, 1, 2), sampled(FIRST, -1, 3)),
            TARGET_SPANS,
            "cover 5",
            id="before-the-first",
        ),
        pytest.param(
            _spans("target_spans", prompt(FIRST, 1, 2), sampled(FIRST, 1, 3)),
            TARGET_SPANS,
            "more tokens than .* which are 3",
            id="behind-the-last",
        ),
        pytest.param(
            lambda batch: batch.inputs.__setitem__(3, 99),
            INPUT_SPANS,
            f"tokens that {FIRST} has not",
            id="another-token-read",
        ),
        pytest.param(
            lambda batch: batch.inputs.__setitem__(0, 99),
            INPUT_SPANS,
            f"tokens that the prompt of {FIRST} has not",
            id="another-prompt",
        ),
        pytest.param(
            lambda batch: setattr(batch, "model_id", "other:train:1"),
            TARGET_SPANS,
            "nothing is recorded",
            id="a-model-of-another-session",
        ),
        pytest.param(
            _spans("target_spans", prompt(FIRST, 1, 2), sampled(f"{FUTURE}.2", 0, 3)),
            TARGET_SPANS,
            "nothing is recorded",
            id="one-more-than-was-drawn",
        ),
        pytest.param(
            _spans("target_spans", prompt(FIRST, 1, 2), sampled("nonsense", 0, 3)),
            TARGET_SPANS,
            "nothing is recorded",
            id="no-name-of-a-sequence",
        ),
        pytest.param(
            _spans("target_spans", *(prompt(f"{FUTURE}.{n}", 0, 0) for n in range(4_097))),
            "data",
            "more than 4096 sequences",
            id="too-many-names",
        ),
    ],
)
async def test_what_was_not_recorded_is_refused_by_its_field(
    recordings: Recordings, change: Change, field: str, words: str
) -> None:
    await keep(recordings)
    batch = Batch()
    change(batch)
    with pytest.raises(InvalidFieldError, match=words) as refusal:
        await batch.check(recordings)
    assert refusal.value.metadata["field"] == field


async def test_a_recording_is_one_of_its_project(recordings: Recordings) -> None:
    await keep(recordings)
    with pytest.raises(InvalidFieldError, match="nothing is recorded"):
        await Batch().check(recordings, project="q")
