"""Settings: read once, from a TOML file and `TINSMITH_*` variables, into a frozen dataclass.

Variables win over the file; unknown keys are an error, so that a misspelt setting is found when the
pod starts and not an hour later.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tinsmith_runtime.errors import ConfigError

ConfigT = TypeVar("ConfigT")

_PREFIX = "TINSMITH_"
_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
_FALSE_WORDS = frozenset({"0", "false", "no", "off"})


def load_config(
    config_class: type[ConfigT],
    *,
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    section: str | None = None,
) -> ConfigT:
    """Build the settings of a pod.

    Args:
        config_class: A dataclass whose fields are str, int, float, bool or Path, perhaps optional.
        path: A TOML file, or None.
        environment: Variables; those of the process by default. A field `drain_timeout_s` is read
            from `TINSMITH_DRAIN_TIMEOUT_S`.
        section: Table of the file to read, its top level by default.

    Raises:
        ConfigError: If a key is unknown, or a value has the wrong type or range.
    """
    values = _read_file(path, section) if path is not None else {}
    hints = typing.get_type_hints(config_class)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(
            f"unknown settings in {path}: {', '.join(unknown)}; known are {', '.join(hints)}"
        )
    variables = os.environ if environment is None else environment
    for field in hints:
        variable = _PREFIX + field.upper()
        if variable in variables:
            values[field] = variables[variable]
    converted = {field: _convert(field, value, hints[field]) for field, value in values.items()}
    try:
        return config_class(**converted)
    except TypeError as error:
        missing = [
            field.name
            for field in dataclasses.fields(config_class)  # type: ignore[arg-type]
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and field.name not in converted
        ]
        raise ConfigError(f"settings without a value: {', '.join(missing)}") from error


def parse_models(text: str) -> dict[str, str]:
    """Return the directory or hub id of each base model in `name=source,name=source`.

    Raises:
        ConfigError: If an entry is not `name=source`.
    """
    models = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, separator, source = entry.partition("=")
        if not (name and separator and source):
            raise ConfigError(f"base_models: {entry!r} is not name=directory")
        models[name] = source
    return models


def _read_file(path: Path, section: str | None) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"settings file {path} can not be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"settings file {path} is not TOML: {error}") from error
    table = content.get(section, {}) if section else content
    if not isinstance(table, dict):
        raise ConfigError(f"[{section}] of {path} is not a table")
    return dict(table)


def _convert(field: str, value: object, hint: Any) -> object:
    """Return a value as the type of its field."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if types.NoneType in options and value in ("", None):
        return None
    wanted = next(option for option in options if option is not types.NoneType)
    if types.NoneType in options and wanted is bool and value == "auto":
        return None
    try:
        if wanted is bool:
            return _convert_bool(value)
        if wanted is Path:
            return Path(str(value)).expanduser()
        is_number_or_text = isinstance(value, int | float | str) and not isinstance(value, bool)
        is_truncated = wanted is int and isinstance(value, float)
        if wanted in (int, float, str) and is_number_or_text and not is_truncated:
            return wanted(value)
    except ValueError:
        pass
    raise ConfigError(f"{field} must be of type {getattr(wanted, '__name__', wanted)}: {value!r}")


def _convert_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in _TRUE_WORDS:
        return True
    if word in _FALSE_WORDS:
        return False
    raise ValueError(word)
