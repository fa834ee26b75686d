"""Environments as a command line names them: `module:Class`, with or without a name before it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tinsmith.names import is_valid_id
from tinsmith_runtime.errors import ConfigError

_SUFFIX = "Environment"
_WORD_BEGIN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def named_classes(words: Sequence[str]) -> dict[str, str]:
    """Return the class path of each environment by its name.

    A class without a name gets its own: `MazeRunEnvironment` is `maze-run`. What is no class, as
    the id in `gymnasium:CartPole-v1`, stays as it is.

    Args:
        words: Each `module:Class`, or `name=module:Class`.

    Raises:
        ConfigError: If a word is neither, or two have one name.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, class_path = word.rpartition("=")
        module, _, class_name = class_path.partition(":")
        if not equals:
            name = default_name(class_name)
        if not (module and class_name and is_valid_id(name)):
            raise ConfigError(f"{word!r} is not module:Class or NAME=module:Class")
        if name in found:
            raise ConfigError(f"two environments are named {name}; give NAME=module:Class")
        found[name] = class_path
    return found


def default_name(class_name: str) -> str:
    """Return the name of an environment that has none but that of its class."""
    if not _CLASS_NAME.fullmatch(class_name):
        return class_name.rpartition("/")[2]
    stem = class_name.removesuffix(_SUFFIX) or class_name
    return _WORD_BEGIN.sub("-", stem).lower().replace("_", "-").strip("-")
