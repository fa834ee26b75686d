"""The page of limits: every bound in the code is on it, or known to be one of the inside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_that_of_the_code() -> None:
    command = [sys.executable, str(DOCS / "limits.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
