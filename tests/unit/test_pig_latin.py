"""The Pig Latin task: the rule, the split over words, and the score."""

from pathlib import Path

import pytest

from tinsmith.recipes.tasks.pig_latin import (
    PhraseSplit,
    build_messages,
    build_prompt,
    load_phrases,
    score_phrase,
    score_phrases,
    split_phrases,
    to_pig_latin,
)


@pytest.fixture(scope="module")
def split() -> PhraseSplit:
    return split_phrases(load_phrases())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("banana", "ananabay", id="one-consonant"),
        pytest.param("string", "ingstray", id="consonant-cluster"),
        pytest.param("apple", "appleway", id="vowel"),
        pytest.param("quick", "ickquay", id="qu-moves-whole"),
        pytest.param("square", "aresquay", id="qu-after-consonant"),
        pytest.param("yellow", "ellowyay", id="y-first-is-consonant"),
        pytest.param("rhythm", "ythmrhay", id="y-later-is-vowel"),
        pytest.param("nth", "nthay", id="no-vowel"),
        pytest.param("the quick fox", "ethay ickquay oxfay", id="phrase"),
        pytest.param("", "", id="empty"),
    ],
)
def test_rule(text: str, expected: str) -> None:
    assert to_pig_latin(text) == expected


def test_shipped_phrases_are_clean_distinct_and_rich() -> None:
    phrases = load_phrases()
    assert 600 <= len(phrases) == len(set(phrases))
    assert all(word.isascii() and word.isalpha() and word.islower() for word in _words(phrases))
    assert len(set(_words(phrases))) >= 1500
    assert all(2 <= len(phrase.split()) <= 5 for phrase in phrases)


def test_held_out_words_never_occur_in_a_training_phrase(split: PhraseSplit) -> None:
    assert split.held_out_words.isdisjoint(_words(split.train_phrases))
    assert set(split.train_phrases).isdisjoint(split.held_out_phrases)
    assert sorted((*split.train_phrases, *split.held_out_phrases)) == sorted(load_phrases())


def test_every_held_out_phrase_is_scored_and_both_parts_are_large(split: PhraseSplit) -> None:
    assert all(split.held_out_words & set(p.split()) for p in split.held_out_phrases)
    assert len(split.train_phrases) >= 500
    assert len(split.held_out_words) >= 100


def test_split_depends_on_words_alone(split: PhraseSplit) -> None:
    backwards = split_phrases(load_phrases()[::-1])
    assert backwards.held_out_words == split.held_out_words
    assert set(backwards.train_phrases) == set(split.train_phrases)


def test_load_phrases_reads_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("one two\n\n three four \n", encoding="utf-8")
    assert load_phrases(path) == ("one two", "three four")


def test_messages_hold_question_and_answer() -> None:
    assert build_messages("the fox") == [
        {"role": "user", "content": "Pig Latin: the fox"},
        {"role": "assistant", "content": "ethay oxfay"},
    ]
    assert build_prompt("the fox") == build_messages("the fox")[:1]


@pytest.mark.parametrize(
    ("completion", "num_correct"),
    [
        pytest.param("ethay oxfay eepslay", 2, id="all"),
        pytest.param("ethay oxfax eepslay", 1, id="one-wrong"),
        pytest.param("ethay", 0, id="too-short"),
        pytest.param("oxfay eepslay", 0, id="wrong-place"),
        pytest.param("wrong oxfay eepslay more", 2, id="only-held-out-words-count"),
    ],
)
def test_score_counts_held_out_words_by_position(completion: str, num_correct: int) -> None:
    score = score_phrase("the fox sleep", completion, frozenset({"fox", "sleep"}))
    assert (score.num_correct, score.num_words) == (num_correct, 2)


def test_scores_add_up() -> None:
    held_out = frozenset({"fox"})
    score = score_phrases(["a fox", "the fox"], ["away oxfay", "ethay"], held_out)
    assert (score.num_correct, score.num_words, score.accuracy) == (1, 2, 0.5)
    assert score_phrases([], [], held_out).accuracy == 0.0
    with pytest.raises(ValueError, match="zip"):
        score_phrases(["a fox"], [], held_out)


def _words(phrases: tuple[str, ...]) -> list[str]:
    return [word for phrase in phrases for word in phrase.split(" ")]
