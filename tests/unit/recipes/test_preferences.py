"""Preference data in the layouts of the field, and the loss of DPO against its definition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.dpo import dpo_loss
from tinsmith.recipes.tasks.preferences import PreferencePair, decode_pair, load_preferences
from tinsmith.types import Datum, ModelInput

USER = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))


def texts(pair: PreferencePair) -> list[list[str]]:
    return [
        [message["content"] for message in conversation.messages]
        for conversation in (pair.chosen, pair.rejected)
    ]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"prompt": "hi", "chosen": "good", "rejected": "bad"}, id="text"),
        pytest.param({"prompt": [USER], "chosen": GOOD, "rejected": [BAD]}, id="messages"),
        pytest.param(
            {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, id="ultrafeedback"
        ),
        pytest.param({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, id="whole"),
    ],
)
def test_every_layout_is_the_same_pair(row: dict[str, Any]) -> None:
    assert texts(decode_pair(row, "here")) == [["hi", "good"], ["hi", "bad"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "chosen": "good"}, "x:1: a row with the keys prompt, chosen is no pair"),
        ([1], "x:1: a row is no pair"),
        ({"chosen": "good", "rejected": "bad"}, "x:1: an answer of the assistant to a prompt"),
        ({"prompt": "hi", "chosen": "a", "rejected": "a"}, "x:1: the answers are equal"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "x:1: neither text nor messages: 3"),
        ({"prompt": "hi", "chosen": [{}], "rejected": "b"}, "x:1: a message has no role"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_by_its_line(row: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        decode_pair(row, "x:1")


def test_a_file_keeps_every_fifth_pair_back(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": str(n), "chosen": "a", "rejected": "b"} for n in range(10)]
    file.write_text("\n".join(map(json.dumps, rows)))
    pairs = load_preferences(str(file))
    assert [texts(pair)[0][0] for pair in pairs.held_out] == ["0", "5"]
    assert len(pairs.train) == 8
    file.write_text(json.dumps(rows[0]))
    with pytest.raises(ConfigurationError, match="needs at least 2 pairs"):
        load_preferences(str(file))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, part in (("train", rows[:3]), ("test", rows[3:4])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    pairs = load_preferences(str(folder))
    assert (len(pairs.train), len(pairs.held_out)) == (3, 1)


def test_the_built_in_task_prefers_the_larger_number() -> None:
    pairs = load_preferences("larger_number")
    held_out = [texts(pair) for pair in pairs.held_out]
    assert not [pair for pair in pairs.train if texts(pair) in held_out]
    assert all(int(chosen[1]) > int(rejected[1]) for chosen, rejected in held_out)


def make_datum(weights: Sequence[float]) -> Datum:
    num_tokens = len(weights)
    return Datum(
        ModelInput.from_ints([1] * num_tokens),
        {
            "target_tokens": np.ones(num_tokens, np.int64),
            "weights": np.array(weights, np.float32),
        },
    )


DATA = [make_datum(weights) for weights in ([0, 1, 1], [0, 1], [0, 0, 1], [0, 1, 1, 1])]


@given(
    st.lists(st.floats(-8, 0), min_size=4, max_size=4),
    st.lists(st.floats(-8, 0), min_size=4, max_size=4),
    st.floats(0.01, 2.0),
)
def test_the_gradient_of_the_loss_is_that_of_its_value(
    levels: list[float], reference: list[float], beta: float
) -> None:
    logprobs = [
        np.full(len(datum.loss_fn_inputs["weights"]), level)
        for datum, level in zip(DATA, levels, strict=True)
    ]
    loss = dpo_loss(reference, beta)
    value, gradients, metrics = loss(DATA, logprobs)
    assert value == metrics["dpo_loss"] >= 0
    for index, gradient in enumerate(gradients):
        moved = [array.copy() for array in logprobs]
        moved[index][-1] += 1e-4
        slope = (loss(DATA, moved)[0] - value) / 1e-4
        # float32 gradients, and a step of a thousandth of the curvature's scale.
        assert slope == pytest.approx(float(gradient[-1]), abs=2e-4)
        assert not gradient[0]


def test_weights_that_are_the_reference_lose_the_logarithm_of_two() -> None:
    logprobs = [np.full(len(datum.loss_fn_inputs["weights"]), -1.0) for datum in DATA]
    value, _, metrics = dpo_loss([-2.0, -1.0, -1.0, -3.0], 0.1)(DATA, logprobs)
    assert value == pytest.approx(np.log(2))
    assert metrics["margin"] == 0


def test_losses_of_hopeless_pairs_do_not_overflow() -> None:
    logprobs = [
        np.full(len(datum.loss_fn_inputs["weights"]), level)
        for datum, level in zip(DATA, [-1e4, 0, -1e4, 0], strict=True)
    ]
    value, gradients, metrics = dpo_loss([0.0] * 4, 1.0)(DATA, logprobs)
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert metrics["accuracy"] == 0
