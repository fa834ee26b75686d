"""`stable_reinforce` through the unmodified `tinker` SDK: batches that name recorded samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import tinker
from tests.integration.servers import BASE_MODEL, Deployment
from tests.integration.tinker_users import PROMPT, connected, train
from tests.integration.tinker_users import collected as collected
from tinker import types

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)
_LOSS = "stable_reinforce"
_SAMPLED = types.SamplingParams(max_tokens=6, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def service(embedded: Deployment) -> Iterator[tinker.ServiceClient]:
    with connected(embedded) as client:
        yield client


@pytest.fixture
def model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()


def _sampled(model: tinker.TrainingClient, num_samples: int = 2) -> list[types.SampledSequence]:
    sampler = model.save_weights_and_get_sampling_client(record_stability_info=True).result()
    answer = sampler.sample(PROMPT, num_samples=num_samples, sampling_params=_SAMPLED).result()
    return list(answer.sequences)


def _datum(sequence: types.SampledSequence, advantage: float = 1.0) -> types.Datum:
    """Return a datum as the cookbook makes it."""
    prompt, tokens = PROMPT.length, sequence.tokens
    assert sequence.logprobs is not None
    before = [0.0] * (prompt - 1)
    datum = types.Datum(
        model_input=PROMPT.append(types.EncodedTextChunk(tokens=tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": np.array([0] * (prompt - 1) + list(tokens)),
            "logprobs": np.array([*before, *sequence.logprobs], dtype=np.float32),
            "advantages": np.array([*before, *[advantage] * len(tokens)], dtype=np.float32),
        },
    )
    name = sequence.sequence_id
    assert name is not None
    return datum.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=prompt),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=prompt - 1),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
        ],
    )


def test_recorded_samples_train_a_model(model: tinker.TrainingClient) -> None:
    for _ in range(3):
        good, bad = _sampled(model)
        data = [_datum(good, 1.0), _datum(bad, -1.0)]
        done = model.forward_backward(data, _LOSS, loss_fn_config={"kl_coeff": 0.1}).result()
        assert done.metrics["tinsmith_stable_reinforce:max"] == 1.0
        # Sampled from the weights that are trained.
        assert done.metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-4)
        assert done.metrics["truncated_fraction:mean"] == 0.0
        update = model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert update.metrics is not None
        assert update.metrics["grad_norm"] > 0


def _change(datum: types.Datum, name: str, value: float) -> types.Datum:
    array = np.array(datum.loss_fn_inputs[name].to_numpy())
    array[-1] = value
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, name: array})


def _without_spans(datum: types.Datum) -> types.Datum:
    return replace(datum, model_input_spans=None, loss_fn_input_spans=None)


def _blamed_prompt(datum: types.Datum) -> types.Datum:
    advantages = np.array(datum.loss_fn_inputs["advantages"].to_numpy())
    advantages[0] = 1.0
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "advantages": advantages})


def _other_prompt(datum: types.Datum) -> types.Datum:
    tokens = datum.model_input.to_ints()
    return replace(datum, model_input=types.ModelInput.from_ints([tokens[0] + 1, *tokens[1:]]))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        pytest.param(_without_spans, "with_provenance", id="no-spans"),
        pytest.param(lambda d: _change(d, "target_tokens", 3), "did not draw", id="tokens"),
        pytest.param(lambda d: _change(d, "logprobs", -0.5), "drawn with", id="logprobs"),
        pytest.param(_blamed_prompt, "not sampled", id="advantage-of-the-prompt"),
        pytest.param(_other_prompt, "the prompt of", id="another-prompt"),
    ],
)
def test_a_batch_that_is_not_what_was_recorded_is_refused(
    model: tinker.TrainingClient, spoil: Callable[[types.Datum], types.Datum], problem: str
) -> None:
    [sequence] = _sampled(model, 1)
    refused = model.forward_backward([spoil(_datum(sequence))], _LOSS)
    with pytest.raises(tinker.RequestFailedError, match=problem):
        refused.result()
    train(model, 1)


def test_recordings_serve_their_own_session(
    embedded: Deployment, model: tinker.TrainingClient
) -> None:
    [sequence] = _sampled(model, 1)
    with connected(embedded) as other:
        theirs = other.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()
        with pytest.raises(tinker.RequestFailedError, match="record_stability_info"):
            theirs.forward_backward([_datum(sequence)], _LOSS).result()


def test_what_was_not_recorded_is_not_known(model: tinker.TrainingClient) -> None:
    sampler = model.save_weights_and_get_sampling_client().result()
    [sequence] = sampler.sample(PROMPT, num_samples=1, sampling_params=_SAMPLED).result().sequences
    with pytest.raises(tinker.RequestFailedError, match="record_stability_info"):
        model.forward_backward([_datum(sequence)], _LOSS).result()
