"""Problems with a checkable answer: what the single-turn RL recipe samples and rewards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith.recipes.tasks import arithmetic
from tinsmith.recipes.tasks.arithmetic import MathRecord

_VALIDATION_EVERY = 5


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """Problems to train on and problems to validate with; no problem is in both."""

    train: Sequence[MathRecord]
    validation: Sequence[MathRecord]

    def draw(self, step: int, *, num_problems: int, seed: int) -> list[MathRecord]:
        """Return the problems of a step: a function of seed and step."""
        generator = random.Random(f"problems:{seed}:{step}")
        if num_problems >= len(self.train):
            return generator.sample(list(self.train), len(self.train))
        return generator.sample(list(self.train), num_problems)


def load_problems(data: str) -> ProblemSet:
    """Return the problems of `arithmetic`, or of a JSONL file in GSM8K's layout.

    Of a file, every fifth problem is for validation; equal questions stay together.

    Raises:
        MathFormatError: If a line of the file is not a problem.
    """
    if data == "arithmetic":
        split = arithmetic.make_split()
        return ProblemSet(split.train, split.validation)
    records = arithmetic.read_jsonl(Path(data))
    questions = list(dict.fromkeys(record.question for record in records))
    if len(questions) < 2:
        raise arithmetic.MathFormatError(f"{data}: needs at least 2 different problems")
    held_out = set(questions[::_VALIDATION_EVERY])
    return ProblemSet(
        [record for record in records if record.question not in held_out],
        [record for record in records if record.question in held_out],
    )
