"""Writes dashboards, alert rules and the runbook, or checks that the committed ones are current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from helm.observability.dashboards import DASHBOARDS
from helm.observability.panels import ROOT, to_json
from helm.observability.rules import rules_text, runbook_text

CHART = ROOT / "helm/tinsmith"


def generated_files() -> dict[Path, str]:
    """Return the content of each file."""
    files = {CHART / "dashboards" / f"{page.uid}.json": to_json(page) for page in DASHBOARDS}
    files[CHART / "alerts/tinsmith.rules.yaml"] = rules_text()
    files[ROOT / "docs/runbook.md"] = runbook_text()
    return files


def main() -> int:
    """Return the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m helm.observability", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is stale")
    is_check = parser.parse_args().check
    files = generated_files()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    left = [path for path in (CHART / "dashboards").glob("*.json") if path not in files]
    if is_check:
        for path in (*stale, *left):
            print(f"{path.relative_to(ROOT)} is stale: run make dashboards", file=sys.stderr)
        return 1 if stale or left else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(files[path])
    for path in left:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
