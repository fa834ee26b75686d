"""A command that writes a page from the code, or fails if the committed one is stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(path: Path, make: Callable[[], str]) -> None:
    """Write what the code says into a file of `docs`; with `--check`, compare it.

    Args:
        path: The file.
        make: Returns its text.

    Raises:
        SystemExit: If the file is stale, or the arguments are none.
    """
    parser = argparse.ArgumentParser(description=f"Writes {path.name} from the code.")
    parser.add_argument("--check", action="store_true", help="fail if the file is stale")
    is_check = parser.parse_args().check
    text = make()
    if not is_check:
        path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        sys.exit(f"docs/{path.name} is stale: run make docs")
