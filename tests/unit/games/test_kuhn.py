import pytest

from tinsmith.games.kuhn import VALUE, KuhnGame, best_response_value, expected_value

AGENTS = ("first", "second")
JACK, QUEEN, KING = 0, 1, 2

FIRST_POLICY = {
    # One of Kuhn's best policies: bluff with jacks a third as often as bet with kings.
    "J": 1 / 3,
    "Q": 0.0,
    "K": 1.0,
    "J pass bet": 0.0,
    "Q pass bet": 2 / 3,
    "K pass bet": 1.0,
}
SECOND_POLICY = {
    "J pass": 1 / 3,
    "Q pass": 0.0,
    "K pass": 1.0,
    "J bet": 0.0,
    "Q bet": 1 / 3,
    "K bet": 1.0,
}
ALWAYS_BET = dict.fromkeys([*FIRST_POLICY, *SECOND_POLICY], 1.0)


def play(deal: tuple[int, int], moves: str) -> KuhnGame:
    game = KuhnGame(AGENTS, deal)
    for move in moves.split():
        [agent] = game.next_agents
        game.apply({agent: move})
    return game


@pytest.mark.parametrize(
    ("deal", "moves", "gain"),
    [
        ((KING, QUEEN), "pass pass", 1),
        ((JACK, QUEEN), "check check", -1),
        ((JACK, KING), "bet fold", 1),
        ((JACK, KING), "bet call", -2),
        ((KING, JACK), "bet bet", 2),
        ((KING, JACK), "pass bet pass", -1),
        ((KING, JACK), "pass bet call", 2),
        ((QUEEN, KING), "pass bet bet", -2),
        ((KING, JACK), "raise", -2),
        ((JACK, KING), "bet maybe", 2),
    ],
)
def test_chips_go_where_the_rules_say(deal: tuple[int, int], moves: str, gain: float) -> None:
    game = play(deal, moves)

    assert game.next_agents == ()
    assert game.rewards == {"first": gain, "second": -gain}


def test_an_agent_sees_its_own_card_and_the_moves() -> None:
    game = play((JACK, KING), "pass")

    assert game.next_agents == ("second",)
    assert game.observe("first").messages[0]["content"] == "card J, moves pass"
    assert game.observe("second").messages[0]["content"] == "card K, moves pass"


def test_equal_seeds_deal_equal_cards_and_all_deals_come() -> None:
    deals = [KuhnGame.dealt(AGENTS, seed).deal for seed in range(100)]

    assert deals == [KuhnGame.dealt(AGENTS, seed).deal for seed in range(100)]
    assert len(set(deals)) == 6


def test_best_policies_win_the_value_of_the_game() -> None:
    assert expected_value(FIRST_POLICY, SECOND_POLICY) == pytest.approx(VALUE)
    assert best_response_value(SECOND_POLICY, seat=0) == pytest.approx(VALUE)
    assert best_response_value(FIRST_POLICY, seat=1) == pytest.approx(-VALUE)


def test_a_bad_policy_can_be_exploited() -> None:
    assert best_response_value(ALWAYS_BET, seat=0) > VALUE + 0.1
    assert best_response_value(ALWAYS_BET, seat=1) > -VALUE + 0.1


@pytest.mark.parametrize("deal", [(0, 0), (0, 3), (-1, 1)])
def test_a_deal_that_does_not_exist_is_refused(deal: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="two different numbers"):
        KuhnGame(AGENTS, deal)


def test_a_move_out_of_turn_is_a_mistake_of_the_program() -> None:
    with pytest.raises(ValueError, match=r"\['first'\] moves now"):
        play((0, 1), "").apply({"second": "bet"})
