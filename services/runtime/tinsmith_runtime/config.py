"""Settings: read once, from a TOML file and `TINSMITH_*` variables, into a frozen dataclass.

Variables win over the file; unknown keys are an error, so that a misspelt setting is found when the
pod starts and not an hour later.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
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
    place = f"[{section}] of {path}" if section else str(path)
    check_known(values, list(hints), place=place)
    variables = os.environ if environment is None else environment
    for field in hints:
        variable = _PREFIX + field.upper()
        if variable in variables:
            values[field] = variables[variable]
    converted = convert_settings(config_class, values)
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
        named = ", ".join(f"{field} ({_PREFIX}{field.upper()})" for field in missing)
        raise ConfigError(
            f"settings without a value: {named}; set the variable, or the name in the file of"
            " --config"
        ) from error


def check_known(
    given: Iterable[str], known: Sequence[str], *, place: str, kind: str = "setting"
) -> None:
    """Refuse settings that do not exist.

    Args:
        given: Names of the settings that a user wrote.
        known: Names that exist.
        place: Where the user wrote them.
        kind: What they are.

    Raises:
        ConfigError: If one is unknown; it names the ones that the first may have been meant as.
    """
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], known, n=3)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    plural = "s" if len(unknown) > 1 else ""
    raise ConfigError(f"{place} has unknown {kind}{plural} {', '.join(unknown)}; {remedy}")


def convert_settings(config_class: type[Any], values: Mapping[str, object]) -> dict[str, Any]:
    """Return settings from a file or from variables as the types of their fields.

    Raises:
        ConfigError: If a value cannot be taken as the type of its field.
    """
    hints = typing.get_type_hints(config_class)
    return {field: _convert(field, value, hints[field]) for field, value in values.items()}


def require_positive(config: object, *fields: str) -> None:
    """Raise ConfigError unless each of these fields is positive and finite."""
    for name in fields:
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} must be positive, got {value}")


def parse_models(text: str, *, setting: str = "base_models") -> dict[str, str]:
    """Return the directory or hub id of each base model in `name=source,name=source`.

    Args:
        text: The value of a setting.
        setting: Its name.

    Raises:
        ConfigError: If an entry is not `name=source`.
    """
    models = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, separator, source = entry.partition("=")
        if not (name and separator and source):
            raise ConfigError(f"{setting}: {entry!r} is not name=value")
        models[name] = source
    return models


def _read_file(path: Path, section: str | None) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be read: {error.strerror}") from error
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


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
