"""Geometry that is read from figures: what is drawn, what is asked, and what is held out."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tinsmith.recipes.tasks.calculator import MAX_LENGTH, CalculationError, calculate
from tinsmith.recipes.tasks.figures import OUTLINES, SIDE, Figure, draw, encode_png
from tinsmith.recipes.tasks.geometry import (
    draw_problem,
    is_held_out,
    make_problem,
    pupil_expression,
)

seeds = st.integers(0, 10**9)
pictures = st.tuples(st.integers(1, 9), st.integers(1, 9)).flatmap(
    lambda sides: st.binary(min_size=3 * sides[0] * sides[1], max_size=3 * sides[0] * sides[1]).map(
        lambda data: np.frombuffer(data, dtype=np.uint8).reshape(*sides, 3)
    )
)


@given(pictures)
def test_a_png_holds_the_pixels_that_were_encoded(pixels: np.ndarray) -> None:
    read = Image.open(io.BytesIO(encode_png(pixels)))
    assert read.format == "PNG"
    assert np.array_equal(np.asarray(read), pixels)


@given(seeds, st.booleans())
def test_a_problem_is_a_function_of_its_seed_and_its_split(seed: int, is_validation: bool) -> None:
    problem = draw_problem(seed, is_validation=is_validation)
    assert problem == draw_problem(seed, is_validation=is_validation)
    assert is_held_out(problem.figure) == is_validation
    assert float(calculate(problem.expression)).is_integer()
    assert pupil_expression(problem, "1") in (problem.expression, problem.hasty_expression)


@given(seeds)
def test_a_figure_shows_its_lengths_and_its_outline(seed: int) -> None:
    figure = draw_problem(seed, is_validation=False).figure
    pixels = np.asarray(Image.open(io.BytesIO(draw(figure))))
    assert pixels.shape == (SIDE, SIDE, 3)
    assert (pixels == OUTLINES[figure.colour]).all(axis=2).any()
    # The cell of the base holds a digit, and that of the height too unless the shape has none.
    is_dark = (pixels < 60).all(axis=2)
    assert is_dark[56:, 28:56].any()
    assert is_dark[28:56, :28].any() == (figure.shape != "circle")


def test_figures_that_differ_look_different() -> None:
    figures = [
        Figure(shape, base, height, colour, shift)  # type: ignore[arg-type]
        for shape in ("rectangle", "triangle")
        for base in (2, 5)
        for height in (3, 4)
        for colour in range(len(OUTLINES))
        for shift in ((0, 0), (1, 0))
    ]
    assert len({draw(figure) for figure in figures}) == len(figures)


def test_a_fifth_of_the_figures_is_held_out() -> None:
    figures = [
        Figure("rectangle", base, height, colour, (x, y))
        for base in range(2, 10)
        for height in range(2, 10)
        for colour in range(3)
        for x in (0, 1)
        for y in (0, 1)
    ]
    share = sum(map(is_held_out, figures)) / len(figures)
    assert 0.15 < share < 0.25


@pytest.mark.parametrize(
    ("figure", "question", "answer", "hasty"),
    [
        (Figure("rectangle", 3, 4), "area?", "12", "12"),
        (Figure("triangle", 3, 4), "area?", "6", "12"),
        (Figure("circle", 5), "diameter?", "10", "5"),
    ],
)
def test_the_hasty_pupil_forgets_to_halve_and_to_double(
    figure: Figure, question: str, answer: str, hasty: str
) -> None:
    problem = make_problem(figure)
    assert problem.question == question
    assert calculate(problem.expression) == answer
    assert calculate(problem.hasty_expression) == hasty


@given(st.integers(-99, 99), st.integers(-99, 99), st.sampled_from(["+", "-", "*"]))
def test_the_calculator_computes_as_python_does(left: int, right: int, sign: str) -> None:
    expression = f"({left}) {sign} ({right})"
    assert float(calculate(expression)) == eval(expression)


@given(st.text(max_size=40))
def test_the_calculator_answers_or_says_that_it_cannot(expression: str) -> None:
    with contextlib.suppress(CalculationError):
        float(calculate(expression))


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1/0",
        "9**9**9",
        "2**99",
        "__import__('os')",
        "x",
        "True",
        "[1]",
        "(-1)**0.5",
        "1+" * MAX_LENGTH + "1",
        "9e999",
    ],
)
def test_the_calculator_refuses_what_is_no_sum(expression: str) -> None:
    with pytest.raises(CalculationError):
        calculate(expression)
