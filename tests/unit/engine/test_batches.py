"""Validation without torch: the error and the field that it names."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tinsmith_engine.batches import validate_batch
from tinsmith_engine.loss_specs import LOSS_SPECS
from tinsmith_engine.values import Datum, ModelInfo
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
    ],
)
def test_a_bad_loss_is_named(
    loss: str, config: dict[str, float], error: type[TinsmithError], field: str
) -> None:
    with pytest.raises(error) as caught:
        validate_batch([datum()], loss, config, INFO)
    assert caught.value.metadata["field"] == field


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
    from tinsmith_engine.losses import LOSSES

    of_sequences = {name for name, spec in LOSS_SPECS.items() if spec.is_of_sequence}
    assert LOSSES.keys() == LOSS_SPECS.keys() - of_sequences
