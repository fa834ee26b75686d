"""Random lives on a bad network: no GPU is given twice, and everything settles.

`make simulate-controller` lives 10,000 of them.
"""

from __future__ import annotations

import json

import pytest
from tests.unit.controller.cluster_in_memory import Json
from tests.unit.controller.lives import Life, failing_seeds

GATE = range(0, 75, 25)
HEAVY = range(75, 500, 25)


@pytest.mark.parametrize("first", GATE)
def test_nothing_is_found_in_the_first_lives(first: int) -> None:
    assert failing_seeds(range(first, first + 25)) == {}


@pytest.mark.parametrize("first", HEAVY)
def test_nothing_is_found_in_further_lives(first: int) -> None:
    assert failing_seeds(range(first, first + 25)) == {}


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_stored_is_shared_and_never_changed(seed: int) -> None:
    life = Life(seed)
    stored: list[tuple[Json, str]] = []
    life.world.listeners.append(
        lambda plural, before, after: stored.append((after, json.dumps(after)))
    )

    life.run()

    assert len(stored) > 100
    assert all(json.dumps(body) == text for body, text in stored)
