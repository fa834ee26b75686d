"""What a failed test leaves: the logs of its processes, and the history of what was written.

Folders of tests go when the session ends. So these files are copied, and the report has the end of
each log of a controller.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.history import History

ROOT = Path(__file__).parents[2] / ".tinsmith" / "e2e"
"""Ignored by git; a file of an earlier failure of the same test is replaced."""
_NUM_LINES = 60
_LOGS = "*.log"


def keep(test: str, folders: Iterable[Path], histories: Iterable[History], *, root: Path) -> str:
    """Copy logs and write histories; return a text for the report.

    Args:
        test: Name of the test.
        folders: Where its processes wrote their logs.
        histories: Those that it took.
        root: Where a folder of the test is made.
    """
    target = root / re.sub(r"[^A-Za-z0-9._-]+", "_", test)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    told = [f"logs and histories are kept in {target}"]
    for log in sorted({path for folder in folders for path in folder.glob(_LOGS)}):
        shutil.copy(log, target / log.name)
        if log.name.startswith("controller"):
            lines = log.read_text(errors="replace").splitlines()[-_NUM_LINES:]
            told += [f"--- the end of {log.name}", *lines]
    for number, history in enumerate(histories):
        (target / f"history-{number}.jsonl").write_text("".join(history.lines()))
    return "\n".join(told)
