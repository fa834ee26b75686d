"""Rock, paper, scissors: which hand wins, what a policy can lose, and the scripts."""

from __future__ import annotations

import pytest

from tinsmith.games import RPS_STRENGTHS, RockPaperScissorsGame, RpsPlayer, RpsStrength
from tinsmith.games.rock_paper_scissors import HANDS, exploitability

BOTH = ("a", "b")


@pytest.mark.parametrize(
    ("first", "second", "gain"),
    [
        ("paper", "rock", 1.0),
        ("scissors", "paper", 1.0),
        ("rock", "scissors", 1.0),
        ("rock", "paper", -1.0),
        (" Rock\n", "r", 0.0),
        ("S", "p", 1.0),
        ("", "r", -1.0),
        ("well", "rock", -1.0),
        ("rock", 7, 1.0),
        ("well", None, 0.0),
    ],
)
def test_a_hand_beats_another(first: object, second: object, gain: float) -> None:
    game = RockPaperScissorsGame(BOTH)
    assert game.next_agents == BOTH
    assert game.rewards == {}
    game.apply({"a": first, "b": second})
    assert game.rewards == {"a": gain, "b": -gain}
    assert game.next_agents == ()


def test_neither_sees_the_other_and_both_move() -> None:
    game = RockPaperScissorsGame(BOTH)
    assert game.observe("a") == game.observe("b")
    with pytest.raises(ValueError, match="move now"):
        game.apply({"a": "rock"})
    game.apply(dict.fromkeys(BOTH, "rock"))
    assert game.observe("a").messages == []
    with pytest.raises(ValueError, match="move now"):
        game.apply(dict.fromkeys(BOTH, "rock"))


@pytest.mark.parametrize(
    ("policy", "loss"),
    [
        (dict.fromkeys(HANDS, 1 / 3), 0.0),
        ({"rock": 1.0}, 1.0),
        ({"rock": 0.5, "paper": 0.25, "scissors": 0.25}, 0.25),
        ({"rock": 0.5, "paper": 0.5}, 0.5),
        # No hand at all is beaten by each.
        ({}, 1.0),
    ],
)
def test_the_best_answer_to_a_policy_is_known(policy: dict[str, float], loss: float) -> None:
    assert exploitability(policy) == pytest.approx(loss)


@pytest.mark.parametrize("strength", RPS_STRENGTHS)
async def test_scripts_show_what_their_strength_says(strength: RpsStrength) -> None:
    game = RockPaperScissorsGame(BOTH)
    script, again = RpsPlayer(strength, seed=3), RpsPlayer(strength, seed=3)
    shown = [await script.choose_move(game, "a") for _ in range(600)]
    assert shown == [await again.choose_move(game, "b") for _ in range(600)]
    found = exploitability({hand: shown.count(hand[0]) / len(shown) for hand in HANDS})
    expected = {"constant": 1.0, "biased": 0.25, "random": 0.0}[strength]
    assert found == pytest.approx(expected, abs=0.12)


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="strength is 'strong'"):
        RpsPlayer("strong")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two agents of different names"):
        RockPaperScissorsGame(["a", "a"])
