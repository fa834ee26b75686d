"""What a worker of environments imports: the API of environments, and no client."""

from __future__ import annotations

import subprocess
import sys

_PROBE = """
import os, sys
import tinsmith_environment, tinsmith_environment.workers.process
heavy = {"numpy", "grpc", "google.protobuf", "tokenizers", "jinja2"} & set(sys.modules)
print(sorted(heavy), len(os.listdir("/proc/self/task")))
"""


def test_a_worker_imports_nothing_heavy_and_starts_no_thread() -> None:
    """A fork server must have one thread, and every worker pays for what is imported."""
    command = [sys.executable, "-c", _PROBE]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "[] 1"
