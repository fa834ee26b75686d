"""Servers that announce themselves on this machine, for tests of which is found."""

from __future__ import annotations

import datetime
import os
from typing import Any

from tinsmith.local_servers import LocalServer


def local_server(address: str, **fields: Any) -> LocalServer:
    """Return what a server of this process says about itself."""
    values: dict[str, Any] = {
        "address": address,
        "api_key": "tsk_test",
        "project": "default",
        "pid": os.getpid(),
        "start_time": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC),
        "data_dir": "/data",
        "models": ("tiny",),
        "device": "cpu, float32",
    }
    return LocalServer(**values | fields)
