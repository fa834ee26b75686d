"""Runs the driver of the browser, `clients/web/test/browser.mjs`, for one state."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WEB = Path(__file__).parents[2] / "clients" / "web"
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Findings:
    """What the driver says: what is wrong, and seconds by what was measured."""

    problems: Sequence[str]
    figures: Mapping[str, float]


def look_at(
    state: str,
    *,
    address: str,
    key: str,
    chromium: str,
    pictures: Path | None = None,
    run: str = "",
    file: Path | None = None,
) -> Findings:
    """Look at a state of the page; pictures go into a folder, if there is one.

    Raises:
        RuntimeError: If the driver itself fails.
    """
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    task = {
        "state": state,
        "url": f"http://{address}",
        "key": key,
        "chromium": chromium,
        "out": str(pictures.resolve()) if pictures is not None else "",
        "run": run,
        "file": str(file or ""),
    }
    done = subprocess.run(
        ["node", "test/browser.mjs"],
        cwd=WEB,
        input=json.dumps(task),
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"the driver of the browser failed: {done.stderr.strip()[-2000:]}")
    answer = json.loads(done.stdout.strip().rpartition("\n")[2])
    return Findings(answer["problems"], answer["figures"])
