"""What `--help` of a pod says of its settings: the fields of its config class, as documented."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from tinsmith.field_docstrings import field_docstrings

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
    meanings = field_docstrings(config_class)
    return [
        Setting(
            variable=f"{prefix}{field.name.upper()}",
            default="" if field.default in _UNSAID else str(field.default),
            is_required=field.default is field.default_factory is dataclasses.MISSING,
            meaning=" ".join(meanings.get(field.name, "").split()),
        )
        for field in dataclasses.fields(config_class)
    ]
