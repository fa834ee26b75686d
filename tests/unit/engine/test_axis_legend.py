"""Letters of shapes in the engine's model modules are those of one legend."""

from __future__ import annotations

import re
from pathlib import Path

import tinsmith_engine.model

_FOLDER = Path(tinsmith_engine.model.__file__).parent
_LETTERS = re.compile(r"\b(?:[A-Z]|H(?:q|kv)|[cn])\b")
_LEGEND_ENTRY = re.compile(r"(?:^#|  ) +((?:[A-Z]|H(?:q|kv)|n, c))  +[a-z]", re.M)
_SHAPE = re.compile(r"\[[^\[\]\n\"':]+\]")


def test_every_axis_of_a_shape_is_in_the_legend() -> None:
    entries = _LEGEND_ENTRY.findall((_FOLDER / "__init__.py").read_text())
    legend = {letter for entry in entries for letter in entry.split(", ")}
    used: dict[str, str] = {}
    for module in sorted(_FOLDER.glob("*.py")):
        for shape in _SHAPE.findall(module.read_text()):
            # An index such as `[c]` in code is no shape: those have an upper-case axis.
            letters = _LETTERS.findall(shape)
            if any(letter[0].isupper() for letter in letters):
                used |= dict.fromkeys(letters, f"{module.name}: {shape}")
    assert {"N", "H", "D", "Hkv", "V", "M"} <= used.keys()
    assert {letter: where for letter, where in used.items() if letter not in legend} == {}
    assert legend <= used.keys()
