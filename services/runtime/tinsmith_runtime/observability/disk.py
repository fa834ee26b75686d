"""Space of a file system as metrics, asked when they are scraped."""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import Gauge


def measure_disk(folder: Path, free_bytes: Gauge, size_bytes: Gauge) -> None:
    """Let gauges tell free space and size of the file system of a folder.

    A folder that cannot be asked any more has 0 bytes free: nothing can be written to it.
    """

    def read(what: str) -> float:
        try:
            found = os.statvfs(folder)
        except OSError:
            return 0.0
        return float(found.f_frsize * getattr(found, what))

    free_bytes.set_function(lambda: read("f_bavail"))
    size_bytes.set_function(lambda: read("f_blocks"))
