"""Rows of records as Parquet, by pyarrow: the extra `parquet`, imported when it is needed.

Columns of tokens are typed lists. Fields that are objects, or lists of them, are JSON as text, for
their keys differ from row to row.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigurationError

_ROWS_AT_ONCE = 64
_LISTS = {
    "tokens": "int64",
    "texts": "string",
    "mask": "int8",
    "logprobs": "double",
    "advantages": "double",
    "versions": "int64",
    "turn_indices": "int64",
    "rewards": "double",
    "sample_starts": "int64",
}
_NUMBERS = {
    "schema": "int64",
    "reward": "double",
    "advantage": "double",
    "environment_seed": "int64",
    "num_samples": "int64",
    "sample_index": "int64",
    "step": "int64",
}
_TEXTS = (
    "episode",
    "kind",
    "environment",
    "base_model",
    "checkpoint",
    "run",
    "phase",
    "agent",
    "reason",
    "failure",
)
_BOOLS = ("is_used",)
_JSON = ("environment_config", "sampling", "limits", "turns", "images", "messages")


def require() -> Any:
    """Return pyarrow's module of Parquet files.

    Raises:
        ConfigurationError: If it is not installed.
    """
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigurationError(
            "Parquet needs pyarrow, which is not installed",
            remedy="pip install 'tinsmith[parquet]', or write .jsonl",
        ) from error


def write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write a file; return the number of rows."""
    files = require()
    arrow: Any = importlib.import_module("pyarrow")
    schema = arrow.schema(
        [(name, arrow.type_for_alias(kind)) for name, kind in _NUMBERS.items()]
        + [(name, arrow.string()) for name in (*_TEXTS, *_JSON)]
        + [(name, arrow.bool_()) for name in _BOOLS]
        + [(name, arrow.list_(arrow.type_for_alias(kind))) for name, kind in _LISTS.items()]
    )
    num_rows = 0
    with files.ParquetWriter(path, schema, compression="zstd") as writer:
        remaining = iter(rows)
        while part := list(itertools.islice(remaining, _ROWS_AT_ONCE)):
            packed = [
                {**row, **{name: json.dumps(row[name], ensure_ascii=False) for name in _JSON}}
                for row in part
            ]
            writer.write_table(arrow.Table.from_pylist(packed, schema=schema))
            num_rows += len(part)
    return num_rows


def read(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their numbers, from 1.

    Raises:
        ConfigurationError: If it is no Parquet file.
    """
    files = require()
    arrow: Any = importlib.import_module("pyarrow")
    number = 0
    try:
        with files.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _unpacked(row)
    except arrow.ArrowInvalid as error:
        raise ConfigurationError(
            f"{path} is no Parquet file: {error}", remedy="check the file"
        ) from error


def _unpacked(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its objects; text that is no JSON stays, for the check to refuse."""
    for name in _JSON:
        value = row.get(name)
        if isinstance(value, str):
            try:
                row[name] = json.loads(value)
            except ValueError:
                continue
    return row
