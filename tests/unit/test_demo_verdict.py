"""What the demo calls learnt."""

import pytest

from tinsmith_local.demo import Row, unlearnt


def rows(*gains: float, pig_latin: float = 0.5) -> list[Row]:
    parts = [Row("Pig Latin: unseen words", 0.0, pig_latin, "", 1.0, pig_latin)]
    return parts + [
        Row(f"RL, seed {n}: 9", 0.3, 0.5, "", 1.0, gain) for n, gain in enumerate(gains)
    ]


@pytest.mark.parametrize(
    ("gains", "missing"),
    [
        ((0.1, 0.1, 0.1), []),
        ((0.1, -0.1, 0.1), []),
        ((0.1, -0.1, 0.0), ["reinforcement learning: 1 of 3 seeds gained"]),
        ((0.0,), ["reinforcement learning: 0 of 1 seeds gained"]),
    ],
)
def test_most_seeds_must_gain(gains: tuple[float, ...], missing: list[str]) -> None:
    assert unlearnt(rows(*gains)) == missing


@pytest.mark.parametrize("gain", [0.0, -0.1, float("nan")])
def test_a_part_that_got_no_better_is_named(gain: float) -> None:
    assert unlearnt(rows(0.1, pig_latin=gain)) == ["Pig Latin: unseen words"]
