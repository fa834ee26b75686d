"""YAML as `kubectl` reads it, so that one file means the same to it and to the command line.

PyYAML differs in small things: it takes the last of two equal keys, makes dates of `2026-11-22` and
numbers of `1:30`, and leaves `1e-3` a text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tinsmith.errors import ConfigurationError

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_TIMESTAMP, _MERGE = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge"
_INT_FORM = re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
_FLOAT_FORM = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_CHARACTERS = list("-+0123456789.")


class _Reader(yaml.SafeLoader):
    """Reads values by the rules of `kubectl`, and refuses a key that a map has twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a map; its keys are texts, as JSON's.

        Raises:
            ConstructorError: If a key is there twice, or is a list or a map.
        """
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = _text_of(self.construct_object(key_node, deep=True), key_node)
            line = key_node.start_mark.line + 1
            if key in lines:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key!r} of line {lines[key]} is there again",
                    key_node.start_mark,
                )
            lines[key] = line
        self.flatten_mapping(node)
        return {
            _text_of(self.construct_object(key_node, deep=True), key_node): self.construct_object(
                value_node, deep=deep
            )
            for key_node, value_node in node.value
        }


_Reader.yaml_implicit_resolvers = {
    first: [each for each in rules if each[0] not in (_INT, _FLOAT, _TIMESTAMP)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Reader.add_implicit_resolver(_INT, _INT_FORM, _CHARACTERS)
_Reader.add_implicit_resolver(_FLOAT, _FLOAT_FORM, _CHARACTERS)


def _construct_int(reader: _Reader, node: yaml.ScalarNode) -> int:
    text = reader.construct_scalar(node).replace("_", "")
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits[1].isdecimal():
        text = text.replace("0", "0o", 1)
    return int(text, 0)


_Reader.add_constructor(_INT, _construct_int)


def read_documents(path: Path) -> list[Any]:
    """Return the documents of a file.

    Args:
        path: Of the file.

    Raises:
        ConfigurationError: If it cannot be read or is no YAML; the line is named.
    """
    try:
        return list(yaml.load_all(path.read_text(encoding="utf-8"), Loader=_Reader))
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}", remedy="check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8", remedy="save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"{path} is no YAML as kubectl reads it: {_sentence(error)}", remedy="correct it"
        ) from error


def parse_value(text: str, *, name: str) -> Any:
    """Return one value as it would be read in a manifest.

    Args:
        text: The value.
        name: What it is a value of, in errors.

    Raises:
        ConfigurationError: If it is no YAML.
    """
    try:
        return yaml.load(text, Loader=_Reader)
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"{name} is no YAML: {_sentence(error)}", remedy="put the value in quotation marks"
        ) from error


def _sentence(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return error.problem if mark is None else f"line {mark.line + 1}: {error.problem}"


def _text_of(key: object, node: yaml.Node) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    if key is None:
        return "null"
    if isinstance(key, str | int | float):
        return str(key)
    raise yaml.constructor.ConstructorError(
        None, None, "a key is a list or a map, which JSON does not have", node.start_mark
    )
