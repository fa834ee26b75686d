"""The embedded server as a child process: for demos, benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tinsmith.local_servers import list_servers

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 45.0
_POLL_S = 0.02
_ASKED_FOR_PORTS = range(20_000, 32_768)
"""Below those that Linux, macOS and Windows give to what asks for any port."""
_TRIED_PORTS = 64


class ServerStartError(RuntimeError):
    """The server ended, or did not listen in time; its log says why."""


class ServerProcess:
    """`python -m tinsmith_local` on a fixed port and data folder, so that it can be started again.

    Args:
        folder: Data, state and logs go below it.
        models: Directory or hub id by base model.
        num_threads: Threads of one operation; 0 takes all cores.
        environment: Further variables of the process.
    """

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, Path | str],
        *,
        num_threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.data_dir = folder / "data"
        self.log = folder / "server.log"
        self.address = f"127.0.0.1:{free_port()}"
        self._state_dir = folder / "state"
        self._models = dict(models)
        self._num_threads = num_threads
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def api_key(self) -> str:
        """The key that the server takes."""
        return (self.data_dir / "api_key").read_text().strip()

    @property
    def pid(self) -> int:
        """Process id of the server that was started last."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def add_model(self, name: str, directory: Path) -> None:
        """Serve another base model from the next start on."""
        self._models[name] = directory

    def start(self) -> None:
        """Start the server and wait until it serves.

        Raises:
            ServerStartError: If it does not come up.
        """
        command = [
            *(sys.executable, "-m", "tinsmith_local", "--data-dir", str(self.data_dir)),
            *("--port", self.address.rpartition(":")[2], "--num-threads", str(self._num_threads)),
            # What is compared with measurements of the CPU must not move to a GPU by itself.
            *("--device", "cpu"),
            # However this process ends, it leaves none behind.
            "--until-input-ends",
        ]
        for name, source in self._models.items():
            command += ["--model", f"{name}={source}"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self._num_threads or os.cpu_count() or 1),
            "TINSMITH_STATE_DIR": str(self._state_dir),
            **self._environment,
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._is_announced():
            if self._process.poll() is not None:
                raise ServerStartError(f"the server ended while it started; see {self.log}")
            if time.monotonic() > deadline_s:
                self.kill()
                raise ServerStartError(f"the server did not start in time; see {self.log}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the server to drain and end; kill it if it does not."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """Send SIGKILL to the server and its workers, and reap it."""
        assert self._process is not None, "the server was not started"
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_announced(self) -> bool:
        return any(server.pid == self.pid for server in list_servers(self._state_dir))


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of an address of this machine that is free, and stays so until it is bound.

    It is one that the system gives to nothing which asks for any port, such as a connection.
    """
    for _ in range(_TRIED_PORTS):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((address, secrets.choice(_ASKED_FOR_PORTS)))
            return int(listener.getsockname()[1])
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])
