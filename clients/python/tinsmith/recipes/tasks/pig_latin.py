"""Pig Latin: the supervised recipe's data, its split and its score.

The task shows that training generalises rather than memorises, so the split is made over *words*,
not over phrases: a set of held-out words is drawn by hash. Every phrase that contains one of them
leaves the training set; only held-out words are scored. A model that copies what it saw scores
zero on them. The draw depends on the words alone, so adding a phrase moves no other word.

Rules of this dialect: leading consonants (with `qu` as one of them) move behind the word and `ay`
follows; a word that begins with a vowel gets `way`; `y` is a vowel except at the beginning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

INSTRUCTION = "Pig Latin: "
"""What stands before the phrase in the user's message."""

HELD_OUT_FRACTION = 0.08
"""Share of the rare words that no training phrase may contain."""

MAX_HELD_OUT_OCCURRENCES = 2
"""Words that occur oftener (`the`, `a`) are never held out: they would take most phrases along."""

_VOWELS = frozenset("aeiou")


@dataclass(frozen=True, slots=True)
class PhraseSplit:
    """Phrases to train on, phrases to score, and the words that count in the score."""

    train_phrases: tuple[str, ...]
    held_out_phrases: tuple[str, ...]
    held_out_words: frozenset[str]


@dataclass(frozen=True, slots=True)
class WordScore:
    """Exact matches over the held-out words of some phrases."""

    num_correct: int
    num_words: int

    @property
    def accuracy(self) -> float:
        """Share of correct words; 0 when there are none."""
        return self.num_correct / self.num_words if self.num_words else 0.0


def to_pig_latin(text: str) -> str:
    """Return `text`, lower case words between spaces, in Pig Latin."""
    return " ".join(_word_to_pig_latin(word) for word in text.split())


def load_phrases(path: Path | None = None) -> tuple[str, ...]:
    """Return the phrases of a file, one to a line, in order; without a path the shipped list."""
    if path is None:
        source = resources.files("tinsmith.recipes") / "data" / "phrases.txt"
        text = source.read_text(encoding="utf-8")
    else:
        text = path.read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def split_phrases(phrases: Sequence[str]) -> PhraseSplit:
    """Split phrases so that no held-out word occurs in a training phrase.

    The split is a pure function of the words: it uses a hash, no random state.
    """
    counts: dict[str, int] = {}
    for phrase in phrases:
        for word in phrase.split():
            counts[word] = counts.get(word, 0) + 1
    held_out_words = frozenset(
        word
        for word, count in counts.items()
        if count <= MAX_HELD_OUT_OCCURRENCES and _unit_hash(word) < HELD_OUT_FRACTION
    )
    train: list[str] = []
    held_out: list[str] = []
    for phrase in phrases:
        (train if held_out_words.isdisjoint(phrase.split()) else held_out).append(phrase)
    return PhraseSplit(tuple(train), tuple(held_out), held_out_words)


def build_prompt(phrase: str) -> list[dict[str, str]]:
    """Return the chat messages that ask for the Pig Latin of a phrase."""
    return [{"role": "user", "content": f"{INSTRUCTION}{phrase}"}]


def build_messages(phrase: str) -> list[dict[str, str]]:
    """Return the whole training conversation of a phrase: question and answer."""
    return [*build_prompt(phrase), {"role": "assistant", "content": to_pig_latin(phrase)}]


def score_phrase(phrase: str, completion: str, held_out_words: frozenset[str]) -> WordScore:
    """Score the held-out words of one phrase by exact match, position by position.

    A completion with too few words misses those at the end; words too many are ignored.
    """
    answers = completion.split()
    num_correct = 0
    num_words = 0
    for position, word in enumerate(phrase.split()):
        if word not in held_out_words:
            continue
        num_words += 1
        if position < len(answers) and answers[position] == to_pig_latin(word):
            num_correct += 1
    return WordScore(num_correct, num_words)


def score_phrases(
    phrases: Sequence[str], completions: Sequence[str], held_out_words: frozenset[str]
) -> WordScore:
    """Return the summed score of phrases and their completions, given in the same order.

    Raises:
        ValueError: If the two sequences differ in length.
    """
    scores = [
        score_phrase(phrase, completion, held_out_words)
        for phrase, completion in zip(phrases, completions, strict=True)
    ]
    return WordScore(sum(s.num_correct for s in scores), sum(s.num_words for s in scores))


def _word_to_pig_latin(word: str) -> str:
    if not word or word[0] in _VOWELS:
        return f"{word}way"
    end = 1
    while end < len(word) and word[end] not in _VOWELS and word[end] != "y":
        end += 1
    if word[end - 1] == "q" and word[end : end + 1] == "u":
        end += 1
    return f"{word[end:]}{word[:end]}ay"


def _unit_hash(word: str) -> float:
    digest = hashlib.sha256(f"pig-latin:{word}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
