"""Geometry that has to be read from a figure: which shape it is, and how long its sides are.

The question alone does not say the lengths. Figures are drawn from seeds. A fifth of them, chosen
by hash, is held out, in all their colours and places: no validation figure is trained on. Lengths
recur, since a small model reads and computes no others than it saw.

The warm start's demonstrations come from a hasty pupil. It mostly answers for a triangle what holds
for a rectangle, and for a circle's diameter its radius. A model that imitates it reads figures, and
shares the fault. Rewards have to show that halving and doubling pay.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from tinsmith.recipes.tasks.figures import OUTLINES, Figure, Shape

HASTY_FRACTION = 0.65
"""Share of the demonstrations in which the pupil is hasty."""

_SHAPES: tuple[Shape, ...] = ("rectangle", "triangle", "circle")
_LENGTHS = (2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class GeometryProblem:
    """One problem.

    Attributes:
        figure: What is seen.
        question: What is asked, in words that hold for every figure.
        expression: What a calculator is to be asked.
        hasty_expression: What the pupil mostly asks.
    """

    figure: Figure
    question: str
    expression: str
    hasty_expression: str


def draw_problem(seed: int, *, is_validation: bool) -> GeometryProblem:
    """Return the problem of a seed, from the figures to train on or from those held out."""
    generator = random.Random(f"geometry:{seed}")
    while True:
        figure = _draw_figure(generator)
        if is_held_out(figure) == is_validation:
            return make_problem(figure)


def make_problem(figure: Figure) -> GeometryProblem:
    """Return the problem that a figure asks."""
    if figure.shape == "circle":
        return GeometryProblem(figure, "diameter?", f"2*{figure.base}", str(figure.base))
    whole = f"{figure.base}*{figure.height}"
    half = f"{whole}/2" if figure.shape == "triangle" else whole
    return GeometryProblem(figure, "area?", half, whole)


def is_held_out(figure: Figure) -> bool:
    """Whether a figure is for validation: a fifth of them is."""
    return _digest(f"held out:{figure}")[0] < 256 // 5


def pupil_expression(problem: GeometryProblem, occurrence: str) -> str:
    """Return what the hasty pupil computes; it decides anew at each occurrence of a problem."""
    digest = _digest(f"hasty:{problem.figure}:{occurrence}")
    is_hasty = int.from_bytes(digest[:8], "big") / 2**64 < HASTY_FRACTION
    return problem.hasty_expression if is_hasty else problem.expression


def _draw_figure(generator: random.Random) -> Figure:
    shape = generator.choice(_SHAPES)
    base, height = generator.choice(_LENGTHS), generator.choice(_LENGTHS)
    colour = generator.randrange(len(OUTLINES))
    shift = (generator.randrange(2), generator.randrange(2))
    if shape == "circle":
        return Figure(shape, base, 0, colour, shift)
    if shape == "triangle" and base * height % 2:
        # Half of the product shall be a whole number.
        height += 1
    return Figure(shape, base, height, colour, shift)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
