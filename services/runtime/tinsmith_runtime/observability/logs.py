"""Structured logs: one JSON object a line, with what the current call is about.

Logs never hold prompts, completions, weights or credentials; a field that is not a plain value is
dropped rather than rendered, so that no message object slips in.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from tinsmith_runtime.errors import ConfigError

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
MAX_LOG_BYTES = 16 * 1024**2
"""Size at which a log file is begun anew; one earlier file is kept."""
_PRIVATE_MODE = 0o600
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_PLAIN_TYPES = (str, int, float, bool, type(None))

_call_fields: ContextVar[dict[str, str]] = ContextVar("tinsmith_log_fields")


def bind_log_fields(**values: str) -> None:
    """Add fields to every line that the current task logs from now on; leave empty values out."""
    fields = {key: value for key, value in values.items() if value}
    _call_fields.set({**_call_fields.get({}), **fields})


class JsonFormatter(logging.Formatter):
    """Renders a record with its extra fields and those of the current call."""

    def __init__(self, pod: str) -> None:
        super().__init__()
        self._pod = pod

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        extra = {
            key: value
            for key, value in vars(record).items()
            if key not in _STANDARD_FIELDS and isinstance(value, _PLAIN_TYPES)
        }
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "pod": self._pod,
            "logger": record.name,
            "event": record.getMessage(),
            **_call_fields.get({}),
            **extra,
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(pod: str, *, level: str = "INFO", stream: IO[str] | None = None) -> None:
    """Send all logs of this process to a stream, standard error by default, as JSON lines.

    Raises:
        ConfigError: If there is no such level.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level} does not exist; choose {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(pod))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def log_to_file(pod: str, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Write all logs of this process to a file too, which only its user can read.

    A file that is full is renamed to `<name>.1`, in the place of the one before. So the two hold
    `max_bytes` each at most, and at least the last `max_bytes` of lines are there.

    Raises:
        OSError: If the file cannot be opened.
    """
    handler = _PrivateFile(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
    handler.setFormatter(JsonFormatter(pod))
    logging.getLogger().addHandler(handler)


class _PrivateFile(RotatingFileHandler):
    """A log that only its user can read, also where it was there before with another mode."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(
            self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _PRIVATE_MODE
        )
        os.fchmod(descriptor, _PRIVATE_MODE)
        return os.fdopen(descriptor, "a", encoding=self.encoding)
