"""The settings of a recipe, as its help and docs/recipes.md show them."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

from tinsmith.field_docstrings import field_docstrings
from tinsmith.recipes.experiment.rules import meaning_of


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeSetting:
    """One setting.

    Attributes:
        default: As it is written on the command line; empty if there is none to write.
        kind: What a value is, such as `int`.
    """

    name: str
    default: str
    kind: str
    meaning: str


def settings_of(config_class: type[Any]) -> Iterator[RecipeSetting]:
    """Yield the settings of a recipe: what its `Config` has or sets itself, then the others."""
    meanings = field_docstrings(config_class)
    hints = typing.get_type_hints(config_class)
    own = inspect.get_annotations(config_class)
    for field in sorted(dataclasses.fields(config_class), key=lambda each: each.name not in own):
        meaning = meanings.get(field.name) or meaning_of(field.name)
        yield RecipeSetting(
            field.name, _default_of(field), _kind_of(hints[field.name]), " ".join(meaning.split())
        )


def _default_of(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is None or default is dataclasses.MISSING:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _kind_of(hint: Any) -> str:
    """Return the name of a type; one that may be left out has that of its values."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [_kind_of(each) for each in typing.get_args(hint) if each is not type(None)]
        return " or ".join(kinds)
    return str(getattr(hint, "__name__", hint)).lower()
