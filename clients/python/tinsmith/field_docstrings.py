"""The sentences below the fields of a class, which are the documentation of settings.

Python drops them, so they are read from the source of the class.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any


def field_docstrings(config_class: type[Any]) -> dict[str, str]:
    """Return the sentence below each field of a class and of those that it derives from.

    A class comes before its bases. Nothing is found where the source is not there.
    """
    return {
        name: sentence
        for each in reversed(config_class.__mro__[:-1])
        for name, sentence in _own_sentences(each).items()
    }


def _own_sentences(config_class: type[Any]) -> dict[str, str]:
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
