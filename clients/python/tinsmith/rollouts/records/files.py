"""Files of records: JSONL, a record on each line, or Parquet, a record in each row.

A file is written as a whole and is there complete or not at all. A folder is read as all its files
in the order of their names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigurationError
from tinsmith.rollouts.records import parquet
from tinsmith.rollouts.records.errors import RecordError, RolloutFileError
from tinsmith.rollouts.records.record import EpisodeRecord

JSONL, PARQUET = ".jsonl", ".parquet"
SUFFIXES = (JSONL, PARQUET)


def check_path(path: Path) -> None:
    """Refuse a name that says no known layout, or one whose packages are missing.

    Raises:
        ConfigurationError: If it is so.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigurationError(
            f"{path} is no name of a file of rollouts",
            remedy=f"end it with {' or '.join(SUFFIXES)}",
        )
    if path.suffix == PARQUET:
        parquet.require()


def write_records(path: Path | str, records: Iterable[EpisodeRecord]) -> int:
    """Write a file, in place of one that is there; return the number of records.

    Args:
        path: Ends with `.jsonl` or `.parquet`.
        records: What is written.

    Raises:
        ConfigurationError: If the name says no known layout, or the file cannot be written.
    """
    path = Path(path)
    check_path(path)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    rows = (record.to_row() for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.suffix == PARQUET:
                num_records = parquet.write(temporary, rows)
            else:
                num_records = _write_lines(temporary, rows)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}", remedy="choose another file"
        ) from error
    return num_records


def read_records(path: Path | str) -> Iterator[EpisodeRecord]:
    """Yield the records of a file, or of all files of a folder.

    Args:
        path: A `.jsonl` or `.parquet` file, or a folder of them.

    Raises:
        ConfigurationError: If there is no such file.
        RolloutFileError: At the first line that is no record; says which, and which field.
    """
    for file in rollout_files(path):
        for number, row in _read_rows(file):
            try:
                yield EpisodeRecord.from_row(row)
            except RecordError as error:
                raise RolloutFileError(file, number, error.field, error.problem) from error


def rollout_files(path: Path | str) -> list[Path]:
    """Return the files that a path names, in order.

    Raises:
        ConfigurationError: If there are none.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
        if not found:
            raise ConfigurationError(
                f"{path} holds no rollouts", remedy=f"give a folder of {' or '.join(SUFFIXES)}"
            )
    elif path.is_file():
        found = [path]
    else:
        raise ConfigurationError(f"there is no file {path}", remedy="check the path")
    for each in found:
        check_path(each)
    return found


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    num_rows = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            json.dump(row, file, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            file.write("\n")
            num_rows += 1
        file.flush()
        os.fsync(file.fileno())
    return num_rows


def _read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        if path.suffix == PARQUET:
            yield from parquet.read(path)
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, _read_line(path, number, line)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror or error}", remedy="check the path"
        ) from error


def _read_line(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise RolloutFileError(path, number, "", f"is no line of JSON: {error}") from error
