"""What `--help` of a pod says of its settings: the fields of its config class, as documented.

The sentences below the fields are the documentation; Python drops them, so they are read from the
source of the class.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import Any

_WIDTH = 92
_PREFIX = "TINSMITH_"
_UNSAID = ("", None, dataclasses.MISSING)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a pod.

    Attributes:
        default: Its default as text; empty if it has none, or an empty one.
        meaning: The sentences below the field.
    """

    variable: str
    default: str
    is_required: bool
    meaning: str


def describe_settings(config_class: type[Any]) -> str:
    """Return the settings of a pod: variable, default and meaning of each, as text for a terminal.

    Args:
        config_class: A dataclass; see `load_config`.
    """
    lines = ["settings (variables, or in lower case and without the prefix in the file):"]
    for setting in settings_of(config_class):
        default = f"  [{setting.default}]" if setting.default else ""
        lines.append(f"  {setting.variable}{'  (required)' if setting.is_required else default}")
        lines += textwrap.wrap(
            setting.meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return "\n".join(lines)


def settings_of(config_class: type[Any], *, prefix: str = _PREFIX) -> list[Setting]:
    """Return the settings of a pod, in the order of their fields.

    Args:
        config_class: A dataclass; see `load_config`.
        prefix: What its variables begin with.
    """
    meanings = {
        name: meaning
        for base in reversed(config_class.__mro__[:-1])
        for name, meaning in _field_docstrings(base).items()
    }
    return [
        Setting(
            variable=f"{prefix}{field.name.upper()}",
            default="" if field.default in _UNSAID else str(field.default),
            is_required=field.default is field.default_factory is dataclasses.MISSING,
            meaning=" ".join(meanings.get(field.name, "").split()),
        )
        for field in dataclasses.fields(config_class)
    ]


def _field_docstrings(config_class: type[Any]) -> dict[str, str]:
    """Return the sentence below each field of a class; nothing where the source is not there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(config_class)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for statement, below in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[statement.target.id] = inspect.cleandoc(below.value.value)
    return found
