"""Processes that serve and may be killed: for demos, benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tinsmith.local_servers import list_servers

_START_TIMEOUT_S = 280.0
"""For what hangs, and for large models on a busy machine: what ends is noticed before."""
_STOP_TIMEOUT_S = 45.0
_POLL_S = 0.02
_TAIL_LINES = 20
_ASKED_FOR_PORTS = range(20_000, 32_768)
"""Below those that Linux, macOS and Windows give to what asks for any port."""
_TRIED_PORTS = 64


class ServerStartError(RuntimeError):
    """A process ended, or did not serve in time; its log says why."""


class ChildProcess:
    """A program in Python with a group of its own, which can be started again and again.

    Args:
        command: Arguments after `python`.
        log: File for its output; each start appends.
        variables: Added to those of this process.
        stdin: As of `subprocess.Popen`; with a pipe, `stop` and `kill` close it.
        stdout: The same; the log by default.

    Attributes:
        exit_codes: Of all starts whose end was seen.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> None:
        self.command = list(command)
        self.log = log
        self.variables = dict(variables or {})
        self.exit_codes: list[int] = []
        self._stdin, self._stdout = stdin, stdout
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = True

    def __enter__(self) -> Self:
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
    def started(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None, f"{' '.join(self.command)} was not started"
        return self._process

    @property
    def pid(self) -> int:
        """Number of the process that was started last."""
        return self.started.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self.poll() is None

    def poll(self) -> int | None:
        """Return the exit code of the process that was started last; None while it runs."""
        code = self.started.poll()
        return None if code is None else self._note_end(code)

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the process, with further variables for this time; it serves a little later."""
        assert not self.is_running, f"{' '.join(self.command)} runs already"
        self.kill()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.command],
                env={**self.inherited(), **self.variables, **(variables or {})},
                stdin=self._stdin,
                stdout=log if self._stdout is None else self._stdout,
                stderr=log,
                start_new_session=True,
            )
        self._is_over = False

    def inherited(self) -> dict[str, str]:
        """Return the variables that it gets from this process."""
        return dict(os.environ)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        self.started.send_signal(number)

    def terminate(self) -> None:
        """Ask the process to end; what does not run needs no asking."""
        if self.is_running:
            self.send(signal.SIGTERM)

    def wait(self, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """Return the exit code, once the process has ended.

        Raises:
            subprocess.TimeoutExpired: If it does not.
        """
        return self._note_end(self.started.wait(timeout_s))

    def stop(self, *, is_asked: bool = False) -> bool:
        """Ask the process to end; kill it if it does not, and what it leaves behind.

        Args:
            is_asked: Whether `terminate` was called before, as for several that end at once.

        Returns:
            Whether it ended by itself.
        """
        if self._process is None:
            return True
        try:
            if not is_asked:
                self.terminate()
            self.wait()
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.kill()
        return True

    def kill(self) -> None:
        """Send SIGKILL to the process and its group, and reap it; repeating changes nothing."""
        if self._process is not None and not self._is_over:
            self._kill_group()
            self._note_end(self._process.wait())

    def _note_end(self, code: int) -> int:
        """Note the exit code, and end the rest of the group while its number is no other's."""
        if not self._is_over:
            self._is_over = True
            self._kill_group()
            self.exit_codes.append(code)
            for pipe in (self.started.stdin, self.started.stdout):
                if pipe is not None:
                    pipe.close()
        return code

    def _kill_group(self) -> None:
        # macOS refuses a signal to a group that is dead and not reaped.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def check_running(self) -> None:
        """Raise ServerStartError, with the end of the log, if the process has ended."""
        if not self.is_running:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise ServerStartError(f"{' '.join(self.command)} ended; see {self.log}:\n{tail}")


class ServerProcess(ChildProcess):
    """`python -m tinsmith_local` on a fixed port and data folder, so that it can be started again.

    Args:
        folder: Data, state and logs go below it.
        models: Directory or hub id by base model; `tinsmith up` has one of its own for none.
        num_threads: Threads of one operation; 0 takes all cores.
        environment: Further variables of the process.
        module: What is run, with arguments that come before those of the server.
        flags: Further arguments.
    """

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, Path | str],
        *,
        num_threads: int = 1,
        environment: Mapping[str, str] | None = None,
        module: Sequence[str] = ("tinsmith_local",),
        flags: Sequence[str] = (),
    ) -> None:
        self.data_dir = folder / "data"
        self.address = f"127.0.0.1:{free_port()}"
        threads = str(num_threads or os.cpu_count() or 1)
        variables = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TINSMITH_STATE_DIR": str(folder / "state"),
            **(environment or {}),
        }
        command = [
            *("-m", *module, "--data-dir", str(self.data_dir)),
            *("--port", self.address.rpartition(":")[2], "--num-threads", str(num_threads)),
            # What is compared with measurements of the CPU must not move to a GPU by itself.
            *("--device", "cpu"),
            # However this process ends, it leaves none behind.
            "--until-input-ends",
        ]
        super().__init__(command, folder / "server.log", variables, stdin=subprocess.PIPE)
        for name, source in models.items():
            self.add_model(name, source)
        self.command += flags

    @property
    def api_key(self) -> str:
        """The key that the server takes."""
        return (self.data_dir / "api_key").read_text().strip()

    def add_model(self, name: str, source: Path | str) -> None:
        """Serve another base model from the next start on."""
        self.command += ["--model", f"{name}={source}"]

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the server and wait until it serves.

        Raises:
            ServerStartError: If it does not come up.
        """
        super().start(variables)
        state_dir = Path(self.variables["TINSMITH_STATE_DIR"])
        try:
            wait_until_served(
                [self], lambda: any(each.pid == self.pid for each in list_servers(state_dir))
            )
        except BaseException:
            self.kill()
            raise


def wait_until_served(processes: Iterable[ChildProcess], is_served: Callable[[], bool]) -> None:
    """Wait until a condition says that processes serve.

    Raises:
        ServerStartError: If one of them ended first, or the time is over.
    """
    watched = list(processes)
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not is_served():
        for process in watched:
            process.check_running()
        if time.monotonic() > deadline_s:
            logs = ", ".join(str(process.log) for process in watched)
            raise ServerStartError(f"not served after {_START_TIMEOUT_S:g} s; see {logs}")
        time.sleep(_POLL_S)


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
