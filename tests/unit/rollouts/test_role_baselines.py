import pytest

from tinsmith.rollouts import RoleBaselines


def test_a_role_is_compared_with_what_it_earns_on_average() -> None:
    baselines = RoleBaselines(decay=0.5)

    # Worked by hand: b <- b / 2 + r / 2, then r - b, for each role apart.
    assert baselines.advantages(["x", "o", "x", "o"], [1.0, -1.0, 1.0, 1.0]) == [
        0.5,
        -0.5,
        0.25,
        0.75,
    ]
    assert baselines.state == {"x": 0.75, "o": 0.25}


def test_a_seat_that_always_wins_teaches_nothing_after_a_while() -> None:
    baselines = RoleBaselines()
    advantages = baselines.advantages(["first", "second"] * 200, [1.0, -1.0] * 200)

    assert advantages[0] > 0.9
    assert max(abs(value) for value in advantages[-2:]) < 1e-3


def test_baselines_go_on_from_their_state() -> None:
    one, other = RoleBaselines(), RoleBaselines()
    one.advantages(["x", "x"], [1.0, 0.0])
    other.restore(one.state)

    assert other.advantages(["x"], [1.0]) == one.advantages(["x"], [1.0])


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_an_impossible_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay is"):
        RoleBaselines(decay=decay)


def test_each_episode_needs_a_role() -> None:
    with pytest.raises(ValueError, match="longer"):
        RoleBaselines().advantages(["x"], [1.0, 2.0])
