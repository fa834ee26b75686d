"""Arithmetic: the reinforcement-learning recipe's problems, their splits and the reward.

Problems are sums of two numbers from 0 to 99, written as records in GSM8K's layout: a `question`
and an `answer` that ends in `#### <number>`. A file of real GSM8K problems is read by the same code
and scored by the same reward.

All 10,000 ordered pairs are put in one fixed pseudo-random order (by hash, without random state)
and cut into three: validation first, then warm start, then training. `3+5` and `5+3` have the
same answer by the same steps, so an unordered pair lies wholly in one split: a model that learned
`3+5` in training has not thereby seen the validation problem `5+3`.

The warm start's demonstrations come from a careless pupil: every column is added correctly, but the
carry of the units is mostly forgotten. A model that imitates them adds well and reliably shares the
fault. Reinforcement learning then has to find, from the reward alone, that carrying pays. A short
warm start alone would end at an accuracy that differs from machine to machine: the skill appears
within a few steps. The pupil decides anew each time that a problem comes up. So the model learns
how often, not a list of exceptions. Rewards and validation know only true sums.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.recipes.tasks.jsonl import DataFormatError, read_lines

NUM_VALUES = 100
"""Operands run from 0 to `NUM_VALUES - 1`."""

NUM_VALIDATION = 256
"""Least number of validation problems."""

NUM_WARM_START = 5000
"""Least number of problems that the supervised warm start may use."""

FORGETS_CARRY_FRACTION = 0.65
"""Share of the demonstrations with a units carry in which the pupil forgets it."""

ANSWER_MARK = "####"
"""What stands before the final answer in GSM8K's layout."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class MathRecord:
    """One problem in GSM8K's layout."""

    question: str
    answer: str
    """The worked solution; its last line is `#### <number>`."""

    @property
    def final_answer(self) -> str:
        """The number behind `####`, normalised."""
        return extract_final_answer(self.answer)


@dataclass(frozen=True, slots=True)
class ArithmeticSplit:
    """Problems of the three uses; no unordered pair of operands occurs in two of them."""

    warm_start: tuple[MathRecord, ...]
    train: tuple[MathRecord, ...]
    validation: tuple[MathRecord, ...]


class MathFormatError(DataFormatError):
    """A record or file does not have GSM8K's layout."""


def make_addition(left: int, right: int) -> MathRecord:
    """Return the problem `left+right=` with its worked answer."""
    total = left + right
    return MathRecord(f"{left}+{right}=", f"{left}+{right}={total}\n{ANSWER_MARK} {total}")


def make_split(
    *, num_warm_start: int = NUM_WARM_START, num_validation: int = NUM_VALIDATION
) -> ArithmeticSplit:
    """Return all sums of two numbers below `NUM_VALUES`, in three disjoint parts.

    Args:
        num_warm_start: Least number of warm start problems.
        num_validation: Least number of validation problems. A part is up to one problem larger
            than asked, because a pair and its mirror image stay together.

    Raises:
        ValueError: If the parts leave nothing to train on.
    """
    pairs = [(left, right) for left in range(NUM_VALUES) for right in range(left, NUM_VALUES)]
    pairs.sort(key=_pair_digest)
    validation: list[MathRecord] = []
    warm_start: list[MathRecord] = []
    train: list[MathRecord] = []
    for left, right in pairs:
        if len(validation) < num_validation:
            part = validation
        elif len(warm_start) < num_warm_start:
            part = warm_start
        else:
            part = train
        part.append(make_addition(left, right))
        if left != right:
            part.append(make_addition(right, left))
    if not train:
        raise ValueError("warm start and validation leave no training problems")
    return ArithmeticSplit(tuple(warm_start), tuple(train), tuple(validation))


def build_prompt(record: MathRecord) -> list[dict[str, str]]:
    """Return the chat messages that ask a problem."""
    return [{"role": "user", "content": record.question}]


def build_messages(record: MathRecord) -> list[dict[str, str]]:
    """Return a training conversation: the question and the record's bare final answer."""
    return [*build_prompt(record), {"role": "assistant", "content": record.final_answer}]


def make_demonstration(record: MathRecord, occurrence: int) -> MathRecord:
    """Return the same problem as the careless pupil answers it at its n-th occurrence.

    Where the pupil forgets, the answer is ten too small; all other answers are true sums. The
    choice is a hash of problem and occurrence, so the whole warm start is reproducible.
    """
    left, right = (int(number) for number in record.question.removesuffix("=").split("+"))
    total = left + right
    digest = hashlib.sha256(f"careless:{left}+{right}:{occurrence}".encode()).digest()
    forgets = int.from_bytes(digest[:8], "big") / 2**64 < FORGETS_CARRY_FRACTION
    if left % 10 + right % 10 >= 10 and forgets:
        total -= 10
    return MathRecord(record.question, f"{record.question}{total}\n{ANSWER_MARK} {total}")


def extract_final_answer(answer: str) -> str:
    """Return the normalised number behind the last `####` of a GSM8K answer.

    Raises:
        MathFormatError: If there is no mark, or no number directly behind it.
    """
    _, mark, tail = answer.rpartition(ANSWER_MARK)
    match = _NUMBER.match(tail.strip().lstrip("$"))
    if not mark or match is None:
        raise MathFormatError(f"no number behind {ANSWER_MARK!r} in answer {answer[-40:]!r}")
    return _normalise(match.group())


def parse_completion(completion: str) -> str | None:
    """Return the number that a completion answers with, normalised, or None.

    A number behind the last `####` counts if the mark is there. Without it the completion must be
    one number and nothing else, so that a list of guesses earns nothing.
    """
    if ANSWER_MARK in completion:
        try:
            return extract_final_answer(completion)
        except MathFormatError:
            return None
    match = _NUMBER.fullmatch(completion.strip())
    return None if match is None else _normalise(match.group())


def reward(record: MathRecord, completion: str) -> float:
    """Return 1 if the completion's answer is the record's, else 0."""
    return 1.0 if parse_completion(completion) == record.final_answer else 0.0


def is_formatted(completion: str | None) -> bool:
    """Whether a completion has the form of an answer; None is one that did not end."""
    return completion is not None and parse_completion(completion) is not None


def is_right(record: MathRecord, completion: str | None) -> bool:
    """Whether a completion's answer is the record's; None is one that did not end."""
    return completion is not None and reward(record, completion) == 1.0


def format_reward(record: MathRecord, completion: str | None, format_coef: float) -> float:
    """Return `1[right] + format_coef * (1[formatted] - 1)`, the cookbook's reward."""
    return is_right(record, completion) + format_coef * (is_formatted(completion) - 1)


def accuracy(records: Sequence[MathRecord], completions: Sequence[str]) -> float:
    """Return the mean reward of one completion for each record, in the same order.

    Raises:
        ValueError: If the sequences differ in length or are empty.
    """
    rewards = [reward(r, c) for r, c in zip(records, completions, strict=True)]
    if not rewards:
        raise ValueError("accuracy needs at least one problem")
    return sum(rewards) / len(rewards)


def read_jsonl(path: Path) -> tuple[MathRecord, ...]:
    """Read a JSONL file in GSM8K's layout; blank lines are skipped, further keys ignored.

    Raises:
        MathFormatError: If the file cannot be read, or a line is not such a record; the message
            names the line.
    """
    return tuple(
        decode_record(line.value, where=line.where) for line in read_lines(path, MathFormatError)
    )


def write_jsonl(path: Path, records: Sequence[MathRecord]) -> None:
    """Write records as JSONL in GSM8K's layout."""
    lines = [json.dumps({"question": r.question, "answer": r.answer}) for r in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def decode_record(value: Any, *, where: str) -> MathRecord:
    """Return the record of an object in GSM8K's layout.

    Raises:
        MathFormatError: If it is none; the message says where.
    """
    if not isinstance(value, dict):
        raise MathFormatError(f"{where}: expected an object, got {type(value).__name__}")
    question, answer = value.get("question"), value.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise MathFormatError(
            f"{where}: `question` and `answer` must be strings; "
            "other rows with a prompt are scored by a reward=FILE.py:score or a judge= of yours"
        )
    record = MathRecord(question, answer)
    try:
        extract_final_answer(answer)
    except MathFormatError as error:
        raise MathFormatError(f"{where}: {error.message}") from error
    return record


def _normalise(number: str) -> str:
    """Drop thousands separators, leading zeros and a fraction of zeros: `1,080.00` is `1080`."""
    whole, _, fraction = number.replace(",", "").partition(".")
    sign = "-" if whole.startswith("-") else ""
    whole = whole.lstrip("-").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    text = f"{whole}.{fraction}" if fraction else whole
    return text if text == "0" else f"{sign}{text}"


def _pair_digest(pair: tuple[int, int]) -> bytes:
    return hashlib.sha256(f"addition:{pair[0]}+{pair[1]}".encode()).digest()
