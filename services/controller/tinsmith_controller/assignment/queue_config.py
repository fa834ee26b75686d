"""The operators' queues and projects, from a TOML file that may change while the controller runs.

```toml
backfill_patience_s = 600.0
[queues.research]
max_gpus = 64
[projects.team-a]
weight = 2.0
max_gpus = 16
```
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith_controller.assignment.types import QueueConfig, Share
from tinsmith_runtime.config import check_known
from tinsmith_runtime.errors import ConfigError

logger = logging.getLogger(__name__)

_SHARE_KEYS = ("max_gpus", "weight")
_TOP_KEYS = ("queues", "projects", "backfill_patience_s")


class QueueConfigFile:
    """The settings of a file, read again when it changes.

    Args:
        path: The file; None has no settings.

    Raises:
        ConfigError: If it cannot be read.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._content = b""
        self._policy = QueueConfig()
        if path is not None:
            self._content = _read(path)
            self._policy = parse_queue_config(self._content, str(path))

    def current(self) -> QueueConfig:
        """Return the settings; after a change that is wrong, those of before."""
        if self._path is None:
            return self._policy
        try:
            content = _read(self._path)
            if content != self._content:
                self._content = content
                self._policy = parse_queue_config(content, str(self._path))
                logger.info("queues were read again", extra={"path": str(self._path)})
        except ConfigError as error:
            logger.error("queues stay as they were", extra={"problem": str(error)})
        return self._policy


def parse_queue_config(content: bytes, source: str) -> QueueConfig:
    """Return the settings of a file's content.

    Raises:
        ConfigError: If it is not TOML, or has unknown keys or wrong values.
    """
    try:
        tables = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not TOML: {error}") from error
    check_known(tables, _TOP_KEYS, place=source)
    patience_s = tables.get("backfill_patience_s", QueueConfig().backfill_patience_s)
    if isinstance(patience_s, bool) or not isinstance(patience_s, int | float) or patience_s < 0:
        raise ConfigError(f"{source}: backfill_patience_s must be a number from 0")
    return QueueConfig(
        queues=_shares(tables, "queues", source),
        projects=_shares(tables, "projects", source),
        backfill_patience_s=float(patience_s),
    )


def _shares(tables: Mapping[str, Any], kind: str, source: str) -> dict[str, Share]:
    found = {}
    entries = tables.get(kind, {})
    if not isinstance(entries, dict):
        raise ConfigError(f"{source}: [{kind}] is not a table")
    for name, entry in entries.items():
        where = f"{source}: [{kind}.{name}]"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where} is not a table")
        check_known(entry, _SHARE_KEYS, place=where)
        max_gpus, weight = entry.get("max_gpus"), entry.get("weight", 1.0)
        if max_gpus is not None and (
            isinstance(max_gpus, bool) or not isinstance(max_gpus, int) or max_gpus < 0
        ):
            raise ConfigError(f"{where} max_gpus must be a whole number from 0")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ConfigError(f"{where} weight must be a positive number")
        found[name] = Share(max_gpus, float(weight))
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
