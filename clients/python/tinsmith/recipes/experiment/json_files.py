"""Files in the folder of an experiment: whole or not there, whatever ends the process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigurationError
from tinsmith.whole_files import write_whole


def write_json(path: Path, value: object) -> None:
    """Write a JSON file; complete or unchanged."""
    write_whole(path, json.dumps(value, indent=1).encode())


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSONL file anew; complete or unchanged."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Write a line of a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None if there is no file.

    Raises:
        ConfigurationError: If it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise damaged(path) from error
    if not isinstance(content, dict):
        raise damaged(path)
    return content


def damaged(path: Path) -> ConfigurationError:
    """Return the error of a file that holds something else than it should."""
    return ConfigurationError(
        f"{path} is damaged", remedy="choose another folder with output_dir=..."
    )
