"""The embedded server as a child process that a test may kill and start again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_START_TIMEOUT_S = 60.0


class ServerProcess:
    """`python -m tinsmith_local` on a fixed port and data folder.

    Args:
        folder: Data, state and logs go below it.
        model: Directory of the base model, served as `tiny`.
        failpoints: Value of TINSMITH_FAILPOINTS.
    """

    def __init__(self, folder: Path, model: Path, *, failpoints: str = "") -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.address = f"127.0.0.1:{free_port()}"
        self._model = model
        self._failpoints = failpoints
        self._trace = folder / "failpoint"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start the server and wait until it listens.

        Raises:
            RuntimeError: If it ends or does not listen in time; the log says why.
        """
        environment = {
            **os.environ,
            "TINSMITH_STATE_DIR": str(self.folder / "state"),
            "TINSMITH_FAILPOINTS": self._failpoints,
            "TINSMITH_FAILPOINT_TRACE": str(self._trace),
        }
        command = [
            *(sys.executable, "-m", "tinsmith_local"),
            *("--model", f"tiny={self._model}", "--data-dir", str(self.data_dir)),
            *("--port", self.address.rpartition(":")[2], "--threads", "1"),
        ]
        state = self.folder / "state" / "local.json"
        state.unlink(missing_ok=True)
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not state.is_file():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the server did not start; see {self.folder / 'server.log'}")
            time.sleep(0.02)

    @property
    def api_key(self) -> str:
        """The key of the server."""
        state = json.loads((self.folder / "state" / "local.json").read_text())
        return str(state["api_key"])

    @property
    def phase(self) -> str:
        """The last failpoint that the server passed."""
        return self._trace.read_text().strip() if self._trace.is_file() else ""

    def kill(self) -> None:
        """Send SIGKILL to the server and its workers, and reap it."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ask the server to end, and wait."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill()


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
