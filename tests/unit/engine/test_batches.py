"""Validation without torch: the error and the field that it names."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tinsmith_engine.base.loss_specs import LOSS_SPECS
from tinsmith_engine.base.types import BatchRequest, Datum, ModelInfo
from tinsmith_engine.training import batch_validation
from tinsmith_engine.training.batch_validation import (
    prepare_request,
    validate_batch,
)
from tinsmith_runtime.errors import (
    EmptyBatchError,
    InvalidFieldError,
    MissingLossInputError,
    NotFiniteInputError,
    SequenceTooLongError,
    ShapeMismatchError,
    TinsmithError,
    TokenOutOfVocabularyError,
    UnknownLossError,
)

INFO = ModelInfo(
    vocab_size=50,
    max_context_tokens=8,
    dtype="float32",
    num_parameters=1,
    exactness="exact",
    family="qwen3",
    fingerprint="",
)


def datum(length: int = 4, **changes: Any) -> Datum:
    weights = np.ones(length, np.float32)
    fields: dict[str, Any] = {
        "tokens_T": np.arange(length),
        "targets_T": np.arange(length),
        "loss_inputs": {"weights": weights},
    }
    return Datum(**fields | changes)


def inputs(**values: Any) -> dict[str, Any]:
    return {"loss_inputs": values}


@pytest.mark.parametrize(
    ("bad", "error", "field"),
    [
        (datum(0), EmptyBatchError, "data[1].model_input"),
        (datum(9), SequenceTooLongError, "data[1].model_input"),
        (datum(targets_T=np.arange(3)), ShapeMismatchError, 'data[1].loss_inputs["target_tokens"]'),
        (datum(tokens_T=np.zeros((4, 1), int)), ShapeMismatchError, "data[1].model_input"),
        (datum(tokens_T=np.zeros(4)), ShapeMismatchError, "data[1].model_input"),
        (datum(tokens_T=np.array([0, 1, 50, 2])), TokenOutOfVocabularyError, "data[1].model_input"),
        (
            datum(targets_T=np.array([0, -1, 5, 2])),
            TokenOutOfVocabularyError,
            'data[1].loss_inputs["target_tokens"]',
        ),
        (datum(loss_inputs={}), MissingLossInputError, 'data[1].loss_inputs["weights"]'),
        (
            datum(**inputs(weights=np.ones(3, np.float32))),
            ShapeMismatchError,
            'data[1].loss_inputs["weights"]',
        ),
        (
            datum(**inputs(weights=np.ones(4, np.int64))),
            ShapeMismatchError,
            'data[1].loss_inputs["weights"]',
        ),
        (
            datum(**inputs(weights=np.array([1, np.nan, 1, 1], np.float32))),
            NotFiniteInputError,
            'data[1].loss_inputs["weights"]',
        ),
        (
            datum(**inputs(weights=np.ones(4, np.float32), extra=np.ones(4, np.float32))),
            InvalidFieldError,
            'data[1].loss_inputs["extra"]',
        ),
    ],
)
def test_a_bad_datum_is_named(bad: Datum, error: type[TinsmithError], field: str) -> None:
    with pytest.raises(error) as caught:
        validate_batch([datum(), bad], "cross_entropy", {}, INFO)
    assert type(caught.value) is error
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("loss", "config", "error", "field"),
    [
        ("no_such_loss", {}, UnknownLossError, "loss.name"),
        ("cross_entropy", {"beta": 1.0}, InvalidFieldError, 'loss.config["beta"]'),
        (
            "ppo",
            {"clip_low_threshold": float("nan")},
            NotFiniteInputError,
            'loss.config["clip_low_threshold"]',
        ),
        (
            "ppo",
            {"clip_low_threshold": 1.3},
            InvalidFieldError,
            'loss.config["clip_low_threshold"]',
        ),
        (
            "gspo",
            {"clip_low_threshold": -0.1},
            InvalidFieldError,
            'loss.config["clip_low_threshold"]',
        ),
        ("dro", {"beta": -0.01}, InvalidFieldError, 'loss.config["beta"]'),
        (
            "dro",
            {"clip_low_threshold": 0.5},
            InvalidFieldError,
            'loss.config["clip_low_threshold"]',
        ),
        (
            "cispo",
            {"clip_high_threshold": 1e39},
            InvalidFieldError,
            'loss.config["clip_high_threshold"]',
        ),
    ],
)
def test_a_bad_loss_is_named(
    loss: str, config: dict[str, float], error: type[TinsmithError], field: str
) -> None:
    with pytest.raises(error) as caught:
        validate_batch([datum()], loss, config, INFO)
    assert caught.value.metadata["field"] == field


def policy_datum(**changes: Any) -> Datum:
    """A datum of 4 tokens for the policy losses; a change of None leaves an input out."""
    found = {"logprobs": [-1.0] * 4, "advantages": [0.0, 1.0, 1.0, -1.0], **changes}
    return datum(
        **inputs(**{k: np.array(v, np.float32) for k, v in found.items() if v is not None})
    )


def wide_datum(num_targets: int, weights: tuple[int, ...] | None = None) -> Datum:
    targets = np.ones((4, num_targets), np.int64)
    shape = (4, num_targets) if weights is None else weights
    return datum(targets_T=targets, **inputs(weights=np.ones(shape, np.float32)))


MASK = [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "config", "good"),
    [
        pytest.param("cross_entropy", {}, wide_datum(1), id="one-target-in-a-column"),
        pytest.param("cross_entropy", {}, wide_datum(128), id="most-targets"),
        pytest.param("importance_sampling", {}, policy_datum(), id="importance_sampling"),
        pytest.param("ppo", {}, policy_datum(clip_low_threshold=[0.0] * 4), id="own-low-bound"),
        pytest.param("cispo", {}, policy_datum(clip_high_threshold=[0.8] * 4), id="bounds-meet"),
        pytest.param("dro", {"beta": 0.0}, policy_datum(), id="beta-of-0"),
        pytest.param("gspo", {}, policy_datum(sequence_ratio_mask=MASK), id="gspo"),
        pytest.param("gspo", {}, policy_datum(sequence_ratio_mask=[0.0] * 4), id="empty-mask"),
    ],
)
def test_a_good_batch_of_each_loss(loss: str, config: dict[str, float], good: Datum) -> None:
    assert validate_batch([good], loss, config, INFO) == (good,)


def test_a_validated_batch_is_not_checked_again_unless_it_is_for_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = validate_batch([policy_datum()], "ppo", {"clip_low_threshold": 0.5}, INFO)
    request = BatchRequest(
        run=None,
        batch=batch,
        loss="ppo",
        loss_config={"clip_low_threshold": 0.5},
        is_backward=False,
    )
    checked: list[str] = []

    def note(batch: object, loss: str, *args: object, **options: object) -> None:
        checked.append(loss)

    monkeypatch.setattr(batch_validation, "validate_batch", note)
    prepared = prepare_request(request, INFO)
    assert (list(prepared.batch), checked) == (list(batch), [])
    prepare_request(dataclasses.replace(request, loss="cispo"), INFO)
    prepare_request(dataclasses.replace(request, loss_config={}), INFO)
    prepare_request(request, dataclasses.replace(INFO, vocab_size=8))
    prepare_request(dataclasses.replace(request, batch=list(batch)), INFO)
    assert checked == ["cispo", "ppo", "ppo", "ppo"]


@pytest.mark.parametrize(
    ("loss", "bad", "error", "field", "says"),
    [
        pytest.param(
            "cross_entropy", wide_datum(0), ShapeMismatchError, "target_tokens", "1 to 128",
            id="no-targets",
        ),
        pytest.param(
            "cross_entropy", wide_datum(129), ShapeMismatchError, "target_tokens", "1 to 128",
            id="too-many-targets",
        ),
        pytest.param(
            "cross_entropy", wide_datum(3, (4,)), ShapeMismatchError, "weights", r"\[4, 3\]",
            id="one-weight-for-three-targets",
        ),
        pytest.param(
            "cross_entropy", wide_datum(3, (4, 2)), ShapeMismatchError, "weights", r"\[4, 2\]",
            id="two-weights-for-three-targets",
        ),
        pytest.param(
            "cross_entropy", datum(**inputs(weights=np.ones((4, 1), np.float32))),
            ShapeMismatchError, "weights", "4 tokens", id="wide-weights-for-plain-targets",
        ),
        pytest.param(
            "cross_entropy", datum(targets_T=np.ones((3, 4), np.int64)), ShapeMismatchError,
            "target_tokens", r"\[3, 4\]", id="wide-targets-too-short",
        ),
        pytest.param(
            "cross_entropy", datum(targets_T=np.ones((4, 1, 1), np.int64)), ShapeMismatchError,
            "target_tokens", r"\[4, 1, 1\]", id="three-axes",
        ),
        pytest.param(
            "cross_entropy", datum(targets_T=np.array([[1, 2], [3, 4], [5, 50], [6, 7]])),
            TokenOutOfVocabularyError, "target_tokens", "position 2", id="wide-token-too-high",
        ),
        pytest.param(
            "cross_entropy",
            datum(
                targets_T=np.ones((4, 2), np.int64),
                **inputs(weights=np.array([[0, 1], [1, 1], [1, np.inf], [0, 0]], np.float32)),
            ),
            NotFiniteInputError, "weights", "is inf at position 2", id="wide-weight-infinite",
        ),
        *(
            pytest.param(
                loss,
                datum(
                    targets_T=np.ones((4, 2), np.int64),
                    **inputs(**dict.fromkeys(LOSS_SPECS[loss].inputs, np.ones(4, np.float32))),
                ),
                ShapeMismatchError, "target_tokens", "one target", id=f"{loss}-wide",
            )
            for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo")
        ),
        pytest.param(
            "gspo", policy_datum(), MissingLossInputError, "sequence_ratio_mask", "gspo",
            id="no-mask",
        ),
        pytest.param(
            "gspo", policy_datum(sequence_ratio_mask=[0.0, 1.0, 0.5, 1.0]), InvalidFieldError,
            "sequence_ratio_mask", "0.5 at position 2", id="mask-is-no-mask",
        ),
        pytest.param(
            "ppo", policy_datum(sequence_ratio_mask=MASK), InvalidFieldError,
            "sequence_ratio_mask", "not an input of loss ppo", id="mask-for-ppo",
        ),
        pytest.param(
            "dro", policy_datum(clip_low_threshold=[0.5] * 4), InvalidFieldError,
            "clip_low_threshold", "not an input of loss dro", id="bounds-for-dro",
        ),
        pytest.param(
            "ppo", policy_datum(clip_low_threshold=[0.5, -0.1, 0.5, 0.5]), InvalidFieldError,
            "clip_low_threshold", "position 1", id="low-bound-negative",
        ),
        pytest.param(
            "ppo", policy_datum(clip_low_threshold=[0.5, 0.5, 1.3, 0.5]), InvalidFieldError,
            "clip_low_threshold", "position 2", id="low-bound-above-the-setting",
        ),
        pytest.param(
            "cispo", policy_datum(clip_high_threshold=[0.7, 1.0, 1.0, 1.0]), InvalidFieldError,
            "clip_high_threshold", "position 0", id="high-bound-below-the-setting",
        ),
        pytest.param(
            "gspo",
            policy_datum(
                sequence_ratio_mask=MASK,
                clip_low_threshold=[0.5] * 4,
                clip_high_threshold=[0.6, 0.6, 0.6, 0.4],
            ),
            InvalidFieldError, "clip_low_threshold", "position 3", id="bounds-cross",
        ),
        pytest.param(
            "ppo", policy_datum(clip_high_threshold=[np.nan] * 4), NotFiniteInputError,
            "clip_high_threshold", "nan at position 0", id="bound-nan",
        ),
        pytest.param(
            "ppo", policy_datum(clip_high_threshold=[1.0] * 3), ShapeMismatchError,
            "clip_high_threshold", r"\[3\]", id="bounds-too-short",
        ),
    ],
)  # fmt: skip
def test_what_a_loss_does_not_take_is_named(
    loss: str, bad: Datum, error: type[TinsmithError], field: str, says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        validate_batch([bad], loss, {}, INFO)
    assert type(caught.value) is error
    assert caught.value.metadata["field"] == f'data[0].loss_inputs["{field}"]'


def test_an_empty_batch_and_a_good_one() -> None:
    with pytest.raises(EmptyBatchError):
        validate_batch([], "cross_entropy", {}, INFO)
    validate_batch([datum(), datum(8)], "cross_entropy", {}, INFO)


def test_validation_does_not_import_torch() -> None:
    script = (
        "import sys, tinsmith_engine; tinsmith_engine.validate_batch; tinsmith_engine.Datum;"
        "tinsmith_engine.validate_sample_request; tinsmith_engine.SampleRequest;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_specs_and_functions_agree() -> None:
    from tinsmith_engine.losses.losses import LOSSES

    of_sequences = {name for name, spec in LOSS_SPECS.items() if spec.is_of_sequence}
    assert LOSSES.keys() == LOSS_SPECS.keys() - of_sequences
