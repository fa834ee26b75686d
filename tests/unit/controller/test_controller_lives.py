"""Random lives on a bad network: no GPU is given twice, and everything settles.

`make simulate-controller` lives 10,000 of them.
"""

from __future__ import annotations

import pytest
from tests.unit.controller.lives import failing_seeds

GATE = range(25)
HEAVY = range(25, 500, 25)


def test_nothing_is_found_in_the_first_lives() -> None:
    assert failing_seeds(GATE) == {}


@pytest.mark.parametrize("first", HEAVY)
def test_nothing_is_found_in_further_lives(first: int) -> None:
    assert failing_seeds(range(first, first + 25)) == {}
