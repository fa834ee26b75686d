"""A calculator for models: sums, products, quotients, powers and brackets, and nothing else.

What a model writes is parsed, never run. Sizes are limited, so that no expression takes long.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

MAX_LENGTH = 200
_MAX_EXPONENT = 64

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


class CalculationError(ValueError):
    """An expression that cannot be computed."""


def calculate(expression: str) -> str:
    """Return the value of an expression, as short as it can be written.

    Raises:
        CalculationError: If it is none, too long, or its value is no finite number.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"longer than {MAX_LENGTH} characters")
    try:
        value = _value_of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, OverflowError, ZeroDivisionError) as error:
        raise CalculationError(f"cannot be computed: {type(error).__name__}") from error
    if isinstance(value, complex) or not math.isfinite(value):
        raise CalculationError("is no finite number")
    return f"{value:.10g}"


def _value_of(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        if isinstance(node.value, bool):
            raise CalculationError("holds a word where a number is wanted")
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value_of(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value_of(node.left), _value_of(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _MAX_EXPONENT:
            raise CalculationError(f"has an exponent above {_MAX_EXPONENT}")
        return _OPERATORS[type(node.op)](left, right)
    raise CalculationError("holds more than numbers, + - * / ** and brackets")
