"""Configurations of recipes: a TOML file and `key=value` words into a frozen dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.errors import ConfigurationError

T = TypeVar("T")

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def load_config(
    kind: type[T],
    path: Path | None,
    overrides: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """Build a configuration.

    Args:
        kind: A dataclass; fields that are dataclasses are tables, `outer.inner=value` as a word.
        path: A TOML file.
        overrides: `key=value`, which win over the file.
        defaults: Values that both win over, in place of those of the dataclass.

    Raises:
        ConfigurationError: If a key is unknown, a value is not of its field's type, or a required
            field is missing.
    """
    values = {**(defaults or {}), **(_read(path) if path else {})}
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigurationError(f"{word!r} is not a setting", remedy="write key=value")
        *tables, last = key.strip().split(".")
        target = values
        for table in tables:
            target = target.setdefault(table, {})
            if not isinstance(target, dict):
                raise ConfigurationError(f"{key!r} goes into {table!r}, which is no table")
        target[last] = text
    return build(kind, values)


def build(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build a dataclass from a table; strings are parsed by the field's annotation."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    built = {}
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise _unknown(prefix, unknown, list(fields))
    for name, value in values.items():
        built[name] = convert(value, hints[name], f"{prefix}{name}")
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in built:
            raise ConfigurationError(
                f"the setting {prefix}{name} is missing", remedy=f"add {prefix}{name}=..."
            )
    try:
        return kind(**built)
    except ValueError as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"the configuration is refused: {error}") from error


def convert(value: Any, hint: Any, key: str) -> Any:
    """Return a value of a file or a word as its field's type wants it.

    Raises:
        ConfigurationError: If it cannot be that.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is typing.Annotated:
        return convert(value, arguments[0], key)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, key)
    if origin is typing.Literal:
        for choice in arguments:
            if value == choice or (isinstance(value, str) and value == str(choice)):
                return choice
        raise ConfigurationError(
            f"{key} is {value!r}", remedy=f"use one of {', '.join(map(str, arguments))}"
        )
    if origin in (list, tuple):
        return _convert_sequence(value, origin, arguments, key)
    if origin is dict or hint is dict:
        if isinstance(value, Mapping):
            item = arguments[1] if arguments else Any
            return {name: convert(part, item, f"{key}.{name}") for name, part in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, Mapping):
            return build(hint, value, f"{key}.")
        if isinstance(value, hint):
            return value
    else:
        return _convert_scalar(value, hint, key)
    raise _wrong_type(value, hint, key)


def _convert_scalar(value: Any, hint: Any, key: str) -> Any:
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
    elif hint in (int, float):
        if isinstance(value, bool):
            raise _wrong_type(value, hint, key)
        if isinstance(value, str | int):
            try:
                return hint(value.replace("_", "") if isinstance(value, str) else value)
            except (ValueError, OverflowError):
                raise _wrong_type(value, hint, key) from None
        if isinstance(value, float) and hint is float:
            return value
    elif hint is str:
        if isinstance(value, str):
            return value
    elif hint is Path:
        if isinstance(value, str | Path):
            try:
                return Path(value).expanduser()
            except RuntimeError as error:
                raise ConfigurationError(f"{key} is {value!r}: {error}") from None
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    raise _wrong_type(value, hint, key)


def _convert_union(value: Any, choices: tuple[Any, ...], key: str) -> Any:
    if type(None) in choices and (value is None or value == "none"):
        return None
    kinds = [choice for choice in choices if choice is not type(None)]
    # A word fits `str` always, so try it last.
    for choice in sorted(kinds, key=lambda choice: choice is str):
        try:
            return convert(value, choice, key)
        except ConfigurationError:
            if len(kinds) == 1:
                raise
    raise _wrong_type(value, " or ".join(map(_type_name, kinds)), key)


def _convert_sequence(value: Any, origin: Any, arguments: tuple[Any, ...], key: str) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value else []
    if not isinstance(value, list | tuple):
        raise _wrong_type(value, origin, key)
    item = arguments[0] if arguments else Any
    hints: list[Any] = [item] * len(value)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(value):
            raise ConfigurationError(f"{key} has {len(value)} values, not {len(arguments)}")
        hints = list(arguments)
    return origin(convert(part, hint, key) for part, hint in zip(value, hints, strict=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}", remedy="check --config"
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is not TOML: {error}", remedy="correct the file"
        ) from error


def _unknown(prefix: str, names: list[str], known: list[str]) -> ConfigurationError:
    num_close = 3 if len(names) == 1 else 1
    found = [difflib.get_close_matches(name, known, num_close, cutoff=0.5) for name in names]
    close = list(dict.fromkeys(match for matches in found for match in matches))
    remedy = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(known)}"
    told = " or ".join(f"{prefix}{name}" for name in names)
    return ConfigurationError(f"there is no setting {told}", remedy=remedy)


def _wrong_type(value: Any, hint: Any, key: str) -> ConfigurationError:
    return ConfigurationError(f"{key} is {value!r}", remedy=f"give a value of {_type_name(hint)}")


def _type_name(hint: Any) -> str:
    return hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
