"""Install the client alone in a clean environment, and fail if a heavy package comes with it.

Run by `make thin-client`. Exit codes: 0, the client is thin; 1, it is not, or does not import;
2, it could not be installed, so nothing is known.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "peft", "vllm", "kubernetes", "minio", "prometheus_client")
THIN, NOT_THIN, NOT_INSTALLED = 0, 1, 2

_INSTALL_TIMEOUT_S = 600
_IMPORT_TIMEOUT_S = 120

# Runs in the clean environment. `-I` keeps the working directory and PYTHONPATH out of it.
_PROBE = """
import importlib.util, sys
import tinsmith
import tinsmith.cli, tinsmith.recipes
heavy = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
print(f"tinsmith {tinsmith.__version__} from {tinsmith.__file__}")
print("heavy packages: " + (", ".join(heavy) or "none"))
sys.exit(1 if heavy else 0)
"""


def main() -> int:
    """Build the environment, look, clean up; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heavy", nargs="*", default=HEAVY, help="packages that must be absent")
    heavy = parser.parse_args().heavy
    with tempfile.TemporaryDirectory(prefix="thin-client-") as folder:
        environment = Path(folder) / "venv"
        venv.create(environment, with_pip=True)
        python = str(environment / "bin" / "python")
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        versions = str(Path(folder) / "versions.txt")
        export = ["uv", "export", "--quiet", "--frozen", "--no-emit-project", "--no-hashes"]
        if not _run(
            [str(Path(sys.executable).with_name(export[0])), *export[1:], "-o", versions],
            str(REPOSITORY),
            _INSTALL_TIMEOUT_S,
        ) or not _run([*install, "-c", versions, str(REPOSITORY)], folder, _INSTALL_TIMEOUT_S):
            return _report(NOT_INSTALLED, "the client could not be installed; see above")
        if not _run([python, "-I", "-c", _PROBE, *heavy], folder, _IMPORT_TIMEOUT_S):
            return _report(NOT_THIN, "the client is not thin, or does not import; see above")
        # The commands of the pods are listed only where their packages are.
        if not _run([str(environment / "bin" / "tinsmith"), "--help"], folder, _IMPORT_TIMEOUT_S):
            return _report(NOT_THIN, "the command line needs more than the client; see above")
    return _report(THIN, "the client is thin")


def _run(command: list[str], folder: str, timeout_s: float) -> bool:
    """Run a command outside of the repository; say what it said unless it is a long success."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            timeout=timeout_s,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        _say(f"{' '.join(command[:4])} ... took over {timeout_s:.0f} s")
        return False
    if done.returncode or command[1] == "-I":
        _say(done.stdout.strip())
    return done.returncode == 0


def _report(code: int, message: str) -> int:
    _say(f"thin-client: {message}")
    return code


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
