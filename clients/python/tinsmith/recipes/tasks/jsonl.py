"""JSONL files of users, read in one way by every recipe.

A line ends at a line feed, as JSONL has it. `str.splitlines` also cuts at characters that JSON
allows inside a string, such as U+2028 and U+0085, which scraped text is full of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigurationError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class DataFormatError(ConfigurationError):
    """A file of data cannot be read as what it is meant to be; the message names the line."""


@dataclass(frozen=True, slots=True)
class JsonLine:
    """One line of a file.

    Attributes:
        value: What its JSON holds.
        number: Counted from 1.
        where: File and line, for messages.
    """

    value: Any
    number: int
    where: str


def read_lines(
    path: Path, error_class: type[DataFormatError] = DataFormatError
) -> Iterator[JsonLine]:
    """Yield the lines of a JSONL file that are not blank.

    Args:
        path: The file; a byte order mark is passed over.
        error_class: What is raised.

    Raises:
        DataFormatError: If the file cannot be read, or a line is not JSON.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path.name}:{number}"
                    yield JsonLine(_decode(line, where, error_class), number, where)
    except UnicodeDecodeError as error:
        raise error_class(f"{path} is not UTF-8: {error.reason}", remedy="convert it") from error
    except OSError as error:
        raise error_class(
            f"{path} cannot be read: {error.strerror}", remedy="check the path given as data"
        ) from error


def _decode(line: str, where: str, error_class: type[DataFormatError]) -> Any:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise error_class(
            f"{where}: not JSON: {error.msg}", remedy="write one JSON object on each line"
        ) from error
    if _SURROGATE.search(line) is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise error_class(
                f"{where}: a text holds half of a surrogate pair, which is no character",
                remedy="leave it out, or write both halves",
            ) from error
    return value
