"""What a schema may ask of the compiler's arithmetic, which the compiler's own limits do not count.

The automaton of `multipleOf: n` has n states. Where several hold for one value, it has as many as
their least common multiple, and they are built before any limit is looked at: four numbers of four
digits take longer than a caller waits and more memory than a pod has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MAX_MULTIPLE = 10_000
"""States of the automaton of the `multipleOf` of one value."""
_JOINING = ("allOf", "anyOf", "oneOf", "$ref", "if")
"""Let several schemas hold for one value."""


def check_multiples(source: str) -> None:
    """Refuse a JSON schema whose `multipleOf` would take too long to compile.

    Args:
        source: The schema. What is no JSON is left to the compiler, which says so.

    Raises:
        ValueError: If a number, or all numbers together where they may meet, are too large.
    """
    try:
        schema = json.loads(source, parse_float=Decimal)
    except (ValueError, RecursionError):
        return
    nodes = list(_nodes(schema))
    numbers = [Decimal(str(node["multipleOf"])) for node in nodes if _is_number(node)]
    if not numbers:
        return
    if not all(number.is_finite() and abs(number.adjusted()) < 20 for number in numbers):
        raise ValueError("multipleOf is too large or too small a number")
    scale = max(max(0, -int(number.as_tuple().exponent)) for number in numbers)
    sizes = [abs(int(number.scaleb(scale))) for number in numbers]
    may_meet = any(word in node for node in nodes for word in _JOINING)
    largest = math.lcm(*sizes) if may_meet else max(sizes)
    if largest > MAX_MULTIPLE:
        raise ValueError(
            f"multipleOf needs {largest} states, and {MAX_MULTIPLE} are allowed; check the value "
            "after sampling"
        )


def _is_number(node: dict[str, Any]) -> bool:
    value = node.get("multipleOf")
    return isinstance(value, int | Decimal) and not isinstance(value, bool) and value != 0


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a schema; those of `properties` are none of its words, and no harm."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
