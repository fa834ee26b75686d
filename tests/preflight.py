"""`make preflight`: whether a commit works on a machine that has nothing of this one.

HEAD is cloned into a new folder and installed from its lock files. It has an empty home, and no
variable but those that a network needs. Then all that is quick is checked there: lint, types
without a cache, the contract, whether all tests can be collected, and the tests that say most.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.tiers import TIERED

ROOT = Path(__file__).parents[1]
KEPT = ("PATH", "LANG", "LC_ALL", "TERM", "USER", "LOGNAME")
KEPT_PARTS = ("PROXY", "CERT", "CA_BUNDLE", "INDEX_URL", "REGISTRY")
"""Of names of variables by which a machine reaches its network."""
SMOKE = (
    "tests/integration/test_quickstart.py",
    "tests/integration/test_readme.py",
    "tests/contract/trainer/test_trainer_durability.py",
    "tests/unit/test_conventions.py",
    "tests/unit/test_prose.py",
    "tests/unit/test_documentation.py",
)
TOOLS = ("npm", "git", "openssl", "bwrap", "strace", "prometheus", "promtool", "kubectl", "helm")
"""What some tests look for; without them their targets install it, or say what is missing."""


def main() -> int:
    """Check a commit; return how many of the checks failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="main", help="tests that differ from here run too")
    options = parser.parse_args()
    if _output("git", "status", "--porcelain"):
        sys.exit("preflight: there are changes that are not committed; commit or stash them")
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        place = Path(folder)
        clone = place / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        head = _output("git", "rev-parse", "HEAD")
        subprocess.run(["git", "-C", str(clone), "checkout", "-q", head], check=True)
        failed = _check_all(clone, _environment(os.environ, place), options.base)
    print(f"\npreflight of {head[:9]}; failed: {', '.join(failed) or 'nothing'}")
    print("looked for: " + ", ".join(f"{tool} {shutil.which(tool) or 'missing'}" for tool in TOOLS))
    return len(failed)


def _check_all(clone: Path, environment: Mapping[str, str], base: str) -> list[str]:
    python = str(clone / ".venv" / "bin" / "python")
    pytest = [python, "-m", "pytest", "-q"]
    tests = dict.fromkeys([*SMOKE, *_changed_tests(base)])
    steps: dict[str, Sequence[str]] = {
        "install": ["make", "venv", "node_modules", "clients/web/node_modules"],
        "lint": ["make", "lint"],
        "types": ["make", "types", "MYPY_CACHE=/dev/null"],
        "contract": ["make", "proto-check", "manifests-check", "page-check"],
        "collect": ["make", "collect"],
        "demo-smoke": ["make", "demo-smoke"],
        "tests": [*pytest, "-n", "logical", "--dist", "loadfile", "-m", "gate", *tests],
    }
    failed = []
    for name, command in steps.items():
        print(f"\n== {name}", flush=True)
        begin_s = time.monotonic()
        done = subprocess.run(command, cwd=clone, env=dict(environment), check=False)
        print(f"== {name}: {time.monotonic() - begin_s:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
        if failed == ["install"]:
            break
    return failed


def _environment(outside: Mapping[str, str], place: Path) -> dict[str, str]:
    """Return the variables of a new machine, with folders of their own."""
    found = {
        name: value
        for name, value in outside.items()
        if name in KEPT or any(part in name.upper() for part in KEPT_PARTS)
    }
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        folder = place / name.lower()
        folder.mkdir()
        found[name] = str(folder)
    return {**found, "CI": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _changed_tests(base: str) -> list[str]:
    """Return the files of tests that differ from a commit; those with a tier alone."""
    names = _output("git", "diff", "--name-only", "--diff-filter=d", f"{base}...HEAD").splitlines()
    return [
        name
        for name in names
        if name.startswith(TIERED) and Path(name).name.startswith("test_") and name.endswith(".py")
    ]


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
