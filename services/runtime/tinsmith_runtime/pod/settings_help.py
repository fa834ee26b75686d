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


def describe_settings(config_class: type[Any]) -> str:
    """Return the settings of a pod: variable, default and meaning of each, as text for a terminal.

    Args:
        config_class: A dataclass; see `load_config`.
    """
    meanings = {
        name: meaning
        for base in reversed(config_class.__mro__[:-1])
        for name, meaning in _field_docstrings(base).items()
    }
    lines = ["settings (variables, or in lower case and without the prefix in the file):"]
    for field in dataclasses.fields(config_class):
        lines.append(f"  {_PREFIX}{field.name.upper()}{_default_of(field)}")
        meaning = meanings.get(field.name, "")
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is not dataclasses.MISSING else "  (required)"
    return "" if field.default in ("", None) else f"  [{field.default}]"


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
