"""Penalties, biases and min-p: what tokens are picked by them, and what is reported."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tinsmith_engine.sampling.decode.logit_shaping import RowShaping, shape_logits
from tinsmith_engine.sampling.decode.token_selection import PickRule, pick
from tinsmith_runtime.errors import InvalidFieldError, NotFiniteInputError
from tinsmith_runtime.text.penalties import MAX_LOGIT_BIASES, Shaping

VOCABULARY = 50


def by_definition(
    logits: np.ndarray, shaping: Shaping, prompt: list[int], completion: list[int]
) -> np.ndarray:
    """Return logits by the rules as they are written down, one token after the other."""
    shaped = logits.astype(np.float64).copy()
    for token in set(prompt) | set(completion):
        factor = shaping.repetition_penalty
        shaped[token] = shaped[token] / factor if shaped[token] > 0 else shaped[token] * factor
    for token in set(completion):
        shaped[token] -= shaping.frequency_penalty * completion.count(token)
        shaped[token] -= shaping.presence_penalty
    for token, bias in shaping.logit_bias.items():
        shaped[token] += bias
    return shaped


def test_logits_are_shaped_by_the_rules_and_rows_alone_as_among_others() -> None:
    random = np.random.default_rng(7)
    shapings = [
        Shaping(frequency_penalty=0.7),
        Shaping(presence_penalty=-1.5),
        Shaping(repetition_penalty=1.8),
        Shaping(logit_bias={3: 100.0, 4: -100.0}),
        Shaping(
            repetition_penalty=0.5,
            frequency_penalty=1.0,
            presence_penalty=0.25,
            logit_bias={1: 2.0, 49: -3.0},
        ),
    ]
    logits = torch.from_numpy(random.normal(size=(6, VOCABULARY)).astype(np.float32) * 5)
    before = logits.clone()
    rows: list[RowShaping | None] = [None]
    expected = [logits[0].double().numpy()]
    for index, shaping in enumerate(shapings, 1):
        prompt = random.integers(VOCABULARY, size=12).tolist()
        completion = random.integers(8, size=30).tolist()
        row = RowShaping(shaping, prompt)
        for token in completion:
            row.note(token)
        rows.append(row)
        expected.append(by_definition(logits[index].numpy(), shaping, prompt, completion))
    shaped = shape_logits(logits, rows)
    np.testing.assert_allclose(shaped.numpy(), np.stack(expected), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)
    for index, row in enumerate(rows):
        alone = shape_logits(logits[index : index + 1], [row])
        assert torch.equal(alone[0], shaped[index])
    assert shape_logits(logits, [None] * 6) is logits


def test_min_p_keeps_tokens_near_the_likeliest() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(200, -1)
    numbers = [(index + 0.5) / 200 for index in range(200)]
    for min_p, kept in ((0.0, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.5, {0, 1}), (1.0, {0})):
        rules = [PickRule(1.0, -1, 1.0, number, min_p) for number in numbers]
        assert set(pick(logits, rules).tolist()) == kept


@pytest.mark.parametrize(
    ("shaping", "field"),
    [
        (Shaping(frequency_penalty=2.1), "frequency_penalty"),
        (Shaping(presence_penalty=-2.1), "presence_penalty"),
        (Shaping(repetition_penalty=0.0), "repetition_penalty"),
        (Shaping(repetition_penalty=-1.0), "repetition_penalty"),
        (Shaping(logit_bias={1: 100.5}), "logit_bias"),
        (Shaping(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)), "logit_bias"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(shaping: Shaping, field: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"params.{field}"):
        shaping.check("params.")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    for shaping in (Shaping(presence_penalty=value), Shaping(logit_bias={1: value})):
        with pytest.raises(NotFiniteInputError):
            shaping.check("params.")
