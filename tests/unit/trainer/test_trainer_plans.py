"""The stored form of a plan."""

from __future__ import annotations

import pytest

from tinsmith_trainer.execution.numerics_plan import NumericsPlan, parse_plan


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (NumericsPlan("torch=2 dtype=float32"), "torch=2 dtype=float32"),
        (NumericsPlan("a;b", 512), "a;b;micro_batch_tokens=512"),
        (NumericsPlan(""), ""),
    ],
)
def test_a_plan_comes_back_from_its_text(plan: NumericsPlan, text: str) -> None:
    assert str(plan) == text
    assert parse_plan(text) == plan


def test_the_engines_own_split_is_not_written() -> None:
    assert str(NumericsPlan("f", 0)) == "f"


@pytest.mark.parametrize("text", ["f;micro_batch_tokens=", "f;micro_batch_tokens=x", "f;micro"])
def test_what_is_no_split_belongs_to_the_fingerprint(text: str) -> None:
    assert parse_plan(text) == NumericsPlan(text)
