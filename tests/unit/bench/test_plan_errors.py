"""How far a plan is from what was measured."""

from __future__ import annotations

import pytest
from bench.plan import CASES, Found, case_rows, error_of, largest_rows

MEBIBYTE = 2**20


def found(planned_mib: int, measured_mib: int, planned_s: float, measured_s: float) -> Found:
    return Found(planned_mib * MEBIBYTE, measured_mib * MEBIBYTE, [planned_s] * 3, [measured_s] * 3)


def test_an_error_is_a_share_of_what_was_measured() -> None:
    assert error_of(150, 100) == pytest.approx(0.5)
    assert error_of(50, 100) == pytest.approx(-0.5)


def test_too_little_is_as_wrong_as_too_much() -> None:
    for planned in (80, 120):
        rows = case_rows(CASES[0], found(planned, 100, planned / 100, 1.0))
        errors = [row for row in rows if "error" in row.name]
        assert [row.value for row in errors] == pytest.approx([0.2, 0.2])
        assert [row.is_met for row in errors] == [False, None]


def test_the_largest_error_of_all_cases_is_told() -> None:
    memory, time = largest_rows([found(90, 100, 1.4, 1.0), found(105, 100, 0.9, 1.0)])
    assert (memory.value, memory.is_met) == (pytest.approx(0.1), True)
    assert time.value == pytest.approx(0.4)
