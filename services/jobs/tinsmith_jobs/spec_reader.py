"""Reads the JSON of a resource field by field; what is wrong is said with the path of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class SpecError(ValueError):
    """A spec that cannot be run; the text is one sentence for its author.

    Args:
        message: The sentence.
        field: Path of the field that is wrong; the first word of the sentence by default.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field or message.partition(" ")[0].rstrip(":")


class Reader:
    """Reads one JSON object and knows where it is in the whole."""

    def __init__(self, value: object, path: str) -> None:
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise SpecError(f"{path} must be an object")
        self._value: Mapping[str, Any] = value
        self.path = path

    def has(self, name: str) -> bool:
        """Whether a field is given."""
        return self._value.get(name) is not None

    def at(self, name: str) -> Reader:
        """Return the reader of an object within; an empty one if it is not given."""
        return Reader(self._value.get(name), f"{self.path}.{name}")

    def text(self, name: str, default: str = "", *, longest: int = 4096) -> str:
        """Return a text."""
        value = self._value.get(name, default)
        if not isinstance(value, str) or len(value) > longest:
            raise SpecError(f"{self.path}.{name} must be a text of at most {longest} characters")
        return value

    def required(self, name: str) -> str:
        """Return a text that must be given."""
        value = self.text(name)
        if not value:
            raise SpecError(f"{self.path}.{name} is required")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a truth value."""
        value = self._value.get(name, default)
        if not isinstance(value, bool):
            raise SpecError(f"{self.path}.{name} must be true or false")
        return value

    def optional_number(self, name: str, *, least: int, most: int = 2**31) -> int | None:
        """Return a whole number within bounds; None if it is not given."""
        value = self._value.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise SpecError(f"{self.path}.{name} must be a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: int, *, least: int, most: int = 2**31) -> int:
        """Return a whole number within bounds."""
        value = self.optional_number(name, least=least, most=most)
        return default if value is None else value

    def choice(self, name: str, options: Sequence[str], default: str = "") -> str:
        """Return one of some words."""
        value = self._value.get(name, default)
        if value not in options:
            raise SpecError(f"{self.path}.{name} must be one of {', '.join(options)}")
        return str(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object as it is."""
        value = self._value.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise SpecError(f"{self.path}.{name} must be an object")
        return {str(key): entry for key, entry in value.items()}

    def texts_by_name(self, name: str) -> dict[str, str]:
        """Return texts by name."""
        found = self.mapping(name)
        for key, entry in found.items():
            if not isinstance(entry, str):
                raise SpecError(f"{self.path}.{name}.{key} must be a text")
        return found

    def items(self, name: str) -> list[Any]:
        """Return a list as it is."""
        value = self._value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise SpecError(f"{self.path}.{name} must be a list")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        found = self.items(name)
        if not all(isinstance(entry, str) for entry in found):
            raise SpecError(f"{self.path}.{name} must be a list of texts")
        return tuple(found)

    def objects(self, name: str) -> list[Reader]:
        """Return the readers of a list of objects."""
        return [
            Reader(entry if entry is not None else "", f"{self.path}.{name}[{position}]")
            for position, entry in enumerate(self.items(name))
        ]
