"""Small sums: two numbers of two digits, none of them above 4, so that nothing is carried.

Digits are added by a table of 25 entries, which a model of a few thousand weights learns within a
minute on one core. The records, splits and rewards are those of `arithmetic`.

The warm start's demonstrations come from a lazy pupil: tens are added, but units are mostly copied
from the first number. A model that imitates them shares the fault. Rewards have to show that adding
the units pays. The pupil decides anew each time that a problem comes up.
"""

from __future__ import annotations

import hashlib

from tinsmith.recipes.tasks.arithmetic import ArithmeticSplit, MathRecord, make_addition

NUM_VALIDATION = 100
"""Least number of validation problems."""

NUM_WARM_START = 150
"""Least number of problems that the warm start may use."""

COPIES_UNITS_FRACTION = 0.65
"""Share of the demonstrations with units to add in which the pupil copies them."""

_NUMBERS = [10 * tens + units for tens in range(1, 5) for units in range(5)]


def make_small_split() -> ArithmeticSplit:
    """Return all small sums in three parts; no unordered pair of numbers is in two of them."""
    pairs = [(left, right) for left in _NUMBERS for right in _NUMBERS if left <= right]
    pairs.sort(key=lambda pair: _digest(f"small sum:{pair[0]}+{pair[1]}"))
    parts: tuple[list[MathRecord], list[MathRecord], list[MathRecord]] = ([], [], [])
    validation, warm_start, train = parts
    for left, right in pairs:
        if len(validation) < NUM_VALIDATION:
            part = validation
        elif len(warm_start) < NUM_WARM_START:
            part = warm_start
        else:
            part = train
        part.append(make_addition(left, right))
        if left != right:
            part.append(make_addition(right, left))
    return ArithmeticSplit(tuple(warm_start), tuple(train), tuple(validation))


def demonstrate(record: MathRecord, occurrence: int) -> str:
    """Return how the lazy pupil answers a problem at its n-th occurrence."""
    left, right = (int(number) for number in record.question.removesuffix("=").split("+"))
    digest = _digest(f"lazy:{left}+{right}:{occurrence}")
    copies = int.from_bytes(digest[:8], "big") / 2**64 < COPIES_UNITS_FRACTION
    return str(left + right - (right % 10 if copies else 0))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
