"""What is wrong with a file of rollouts."""

from __future__ import annotations

from pathlib import Path

from tinsmith.rollouts.errors import RolloutError


class RolloutFileError(RolloutError, ValueError):
    """A line of a file of rollouts is no record.

    Attributes:
        path: The file.
        line: Number of the line, or of the row of a Parquet file; from 1.
        field: The field that is wrong; empty if the whole line is.
    """

    def __init__(self, path: Path, line: int, field: str, problem: str) -> None:
        where = f"{path}:{line}: " + (f"{field} " if field else "")
        super().__init__(f"{where}{problem}")
        self.path = path
        self.line = line
        self.field = field


class RecordError(ValueError):
    """A row is no record; the reader adds the file and the line."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}".strip())
        self.field = field
        self.problem = problem
