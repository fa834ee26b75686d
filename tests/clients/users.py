"""What tests of other systems' clients share: their environment, and a user with URL and key."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tinsmith_local.process import ServerProcess

_ROOT = Path(__file__).parents[2]
BIN = Path(os.environ.get("TINSMITH_CLIENTS_VENV", _ROOT / ".venv-clients")).absolute() / "bin"
"""What `make venv-clients` makes."""

PROGRAMS = Path(__file__).parent / "programs"
_TIMEOUT_S = 600.0
"""Of a command that hangs. One takes ten seconds on a machine that does nothing else."""


class User:
    """Someone with a URL, a key, and a folder."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.folder = folder
        self.url = f"http://{server.address}"
        self.key = server.api_key
        inherited = ("PATH", "TMPDIR", "LANG")
        self._environment = {
            **{name: os.environ[name] for name in inherited if name in os.environ},
            **{f"{name}_BASE_URL": f"{self.url}/v1" for name in ("OPENAI", "TINSMITH")},
            **{f"{name}_API_KEY": self.key for name in ("OPENAI", "TINSMITH")},
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.key.replace("tsk_", "tml-", 1),
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # Prices, versions and traces are asked for elsewhere: no server listens here.
            "HTTPS_PROXY": "http://127.0.0.1:9",
        }

    def run(self, *command: str | Path) -> str:
        """Run a command to its end; return what it wrote."""
        done = self._succeed(*command)
        return done.stdout + done.stderr

    def fail(self, *command: str | Path) -> str:
        """Run a command that is to fail; return what it wrote."""
        done = self._run(*command)
        output = done.stdout + done.stderr
        assert done.returncode == 1, f"{command} ended with {done.returncode}:\n{output}"
        return output

    def run_program(self, name: str, *arguments: str | Path) -> list[dict[str, Any]]:
        """Run a program; return the JSON objects that it wrote, a line each."""
        output = self._succeed(BIN / "python", PROGRAMS / f"{name}.py", *arguments).stdout
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def _succeed(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        done = self._run(*command)
        assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
        return done

    def _run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            env=self._environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
