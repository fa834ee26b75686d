"""How blocks of steps become what watching costs."""

from __future__ import annotations

import pytest
from bench.observability import Block, added_by_second, added_by_step, noise_ratios, wall_ratios
from bench.watchers import overview_names


def block(num_steps: int, *, step_s: float = 0.1, beside_s: float, wall_s: float = 1.0) -> Block:
    """Return a block whose steps take 0.1 s of CPU each, beside what is given for all."""
    return Block(num_steps, num_steps * step_s, wall_s, num_steps * 0.1 + beside_s, beside_s)


def test_what_is_added_to_a_step_is_a_share_of_the_whole_step() -> None:
    on, off = block(10, beside_s=0.3), block(10, beside_s=0.2)
    assert added_by_step([(on, off)]) == [pytest.approx(0.01 / 0.12)]


def test_blocks_of_other_lengths_are_compared_by_step() -> None:
    on, off = block(20, beside_s=0.4), block(10, beside_s=0.2)
    assert added_by_step([(on, off)]) == [pytest.approx(0)]
    assert added_by_second([(on, off)]) == [pytest.approx(0)]


def test_what_asks_by_the_clock_is_a_share_of_a_core() -> None:
    on, off = block(10, beside_s=0.25, wall_s=5.0), block(10, beside_s=0.2, wall_s=5.0)
    assert added_by_second([(on, off)]) == [pytest.approx(0.01)]


def test_noise_is_what_steps_differ_by_with_nothing_on() -> None:
    pairs = [
        (block(2, step_s=0.3, beside_s=0), block(2, step_s=0.2, beside_s=0)),
        (block(4, step_s=0.2, beside_s=0), block(4, step_s=0.1, beside_s=0)),
    ]
    assert wall_ratios(pairs) == pytest.approx([1.5, 2.0])
    assert noise_ratios(pairs) == pytest.approx([0.5])


def test_the_page_is_asked_for_what_its_source_asks_for() -> None:
    assert {"reward", "trainer/loss", "grad_norm"} <= set(overview_names())
