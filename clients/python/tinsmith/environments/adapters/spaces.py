"""Spaces of Gymnasium as text: what an observation says, and which action a text means.

A space is known by the fields that its kind has, so that nothing is imported here. Numbers in a
text are read from its end, since a model most often reasons first and answers last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_PRECISION = 4
_MAX_ENTRIES = 512
"""Of an array that is shown; a longer one needs a `render` of its own."""


class UnreadableActionError(ValueError):
    """A text holds no action of the space; says what it should hold."""


def show(observation: Any) -> str:
    """Return an observation as text.

    Raises:
        ValueError: If it is an array of too many numbers.
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {show(each)}" for name, each in observation.items())
    if isinstance(observation, tuple | list):
        return ", ".join(show(each) for each in observation)
    array = np.asarray(observation)
    if array.size > _MAX_ENTRIES:
        raise ValueError(
            f"an observation of shape {array.shape} is too long as text; give a `render`"
        )
    if array.ndim == 0 and array.dtype.kind in "iub":
        return str(array.item())
    return np.array2string(
        array, precision=_PRECISION, suppress_small=True, separator=", ", threshold=_MAX_ENTRIES
    )


def describe(space: Any) -> str:
    """Return what an action of a space is, as a model is told it.

    Raises:
        TypeError: If the space is none that a text can be read into.
    """
    match type(space).__name__:
        case "Discrete":
            return f"a whole number from {int(space.start)} to {int(space.start + space.n) - 1}"
        case "MultiDiscrete":
            limits = ", ".join(str(int(each)) for each in np.ravel(space.nvec))
            return f"{np.size(space.nvec)} whole numbers, each from 0 and below: {limits}"
        case "MultiBinary":
            return f"{int(np.prod(space.shape))} numbers, each 0 or 1"
        case "Box":
            return f"{int(np.prod(space.shape))} numbers within their bounds"
        case "Text":
            return f"a text of at most {space.max_length} characters"
    raise TypeError(f"a text cannot be read as an action of {type(space).__name__}; give a `parse`")


def read(text: str, space: Any) -> Any:
    """Return the action that a text ends with.

    Raises:
        UnreadableActionError: If it holds none of the space.
        TypeError: If the space is none that a text can be read into.
    """
    wanted = describe(space)
    kind = type(space).__name__
    if kind == "Text":
        action: Any = text.strip()
    else:
        num_wanted = 1 if kind == "Discrete" else int(np.prod(space.shape))
        found = _NUMBER.findall(text)[-num_wanted:]
        if len(found) < num_wanted:
            raise UnreadableActionError(f"answer with {wanted}")
        values = np.asarray([float(each) for each in found])
        if kind != "Box" and (values != np.round(values)).any():
            raise UnreadableActionError(f"answer with {wanted}")
        action = space.dtype.type(values[0]) if kind == "Discrete" else _shaped(values, space)
    if not space.contains(action):
        raise UnreadableActionError(f"answer with {wanted}")
    return action


def _shaped(values: Any, space: Any) -> Any:
    return values.reshape(space.shape).astype(space.dtype)
