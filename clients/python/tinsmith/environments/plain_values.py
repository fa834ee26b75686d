"""Values of others as JSON has them: numbers of numpy, infinities and objects included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def to_plain(value: Any) -> Any:
    """Return a value as JSON has it; a number that JSON lacks becomes None, an object text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): to_plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [to_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    return str(value)
