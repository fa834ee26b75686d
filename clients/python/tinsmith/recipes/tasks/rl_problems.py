"""Problems with a checkable answer: what the single-turn RL recipe samples and rewards."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith.recipes.tasks import arithmetic, small_sums
from tinsmith.recipes.tasks.arithmetic import MathRecord
from tinsmith.recipes.tasks.public_data import is_public, read_rows

SHIPPED = ("arithmetic", "small_sums")
"""Problems that come with the package."""
_VALIDATION_EVERY = 5


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """Problems to train on and problems to validate with; no problem is in both.

    Attributes:
        warm_start: Problems that are only imitated, or those to train on.
        demonstrate: Returns how a problem is answered at the n-th step of a warm start.
        instruction: What is written below each question.
    """

    train: Sequence[MathRecord]
    validation: Sequence[MathRecord]
    warm_start: Sequence[MathRecord] = ()
    demonstrate: Callable[[MathRecord, int], str] = lambda record, _step: record.answer
    instruction: str = ""

    def prompt(self, record: MathRecord) -> list[dict[str, str]]:
        """Return the chat messages that ask a problem."""
        messages = arithmetic.build_prompt(record)
        if self.instruction:
            messages[-1]["content"] += f"\n{self.instruction}"
        return messages

    def draw(self, step: int, *, num_problems: int, seed: int) -> list[MathRecord]:
        """Return the problems of a step: a function of seed and step."""
        generator = random.Random(f"problems:{seed}:{step}")
        if num_problems >= len(self.train):
            return generator.sample(list(self.train), len(self.train))
        return generator.sample(list(self.train), num_problems)


def load_problems(data: str, *, instruction: str = "") -> ProblemSet:
    """Return the problems of `arithmetic` or `small_sums`, or of data in GSM8K's layout.

    That is a JSONL file, a folder, or a data set of the hub (`public_data`). Of a file, every
    fifth problem is for validation; equal questions stay together.

    Raises:
        MathFormatError: If a line of the file is not a problem.
    """
    if data == "arithmetic":
        split = arithmetic.make_split()
        return ProblemSet(
            split.train,
            split.validation,
            split.warm_start,
            lambda record, step: arithmetic.make_demonstration(record, step).final_answer,
            instruction,
        )
    if data == "small_sums":
        split = small_sums.make_small_split()
        return ProblemSet(
            split.train, split.validation, split.warm_start, small_sums.demonstrate, instruction
        )
    if is_public(data):
        rows = read_rows(data)
        parts = [
            [
                arithmetic.decode_record(row, where=f"{data}, {part} {number}")
                for number, row in enumerate(rows[part])
            ]
            for part in ("train", "validation")
        ]
        return ProblemSet(parts[0], parts[1], parts[0], instruction=instruction)
    records = arithmetic.read_jsonl(Path(data))
    questions = list(dict.fromkeys(record.question for record in records))
    if len(questions) < 2:
        raise arithmetic.MathFormatError(f"{data}: needs at least 2 different problems")
    held_out = set(questions[::_VALIDATION_EVERY])
    train = [record for record in records if record.question not in held_out]
    return ProblemSet(
        train,
        [record for record in records if record.question in held_out],
        train,
        instruction=instruction,
    )
