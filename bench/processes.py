"""The two sides as child processes with the same number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

import tinsmith
from tinsmith.local_servers import list_servers

_START_TIMEOUT_S = 400.0
_STOP_TIMEOUT_S = 30.0


class Child:
    """A process whose memory and CPU time can be read; ended when the context ends.

    Args:
        command: Arguments after `python`.
        num_threads: Threads of its numerical libraries.
        log: Where its stderr goes, and its stdout unless that is a pipe.
        environment: Variables to add.
        has_pipes: Whether stdin and stdout are pipes to this process.
    """

    def __init__(
        self,
        command: list[str],
        *,
        num_threads: int,
        log: Path,
        environment: dict[str, str] | None = None,
        has_pipes: bool = False,
    ) -> None:
        self.log = log
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        with log.open("ab") as file:
            self._process: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **threads, **offline, **(environment or {})},
                stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if has_pipes else file,
                stderr=file,
                text=True,
            )
        self._stats = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def peak_memory_bytes(self) -> int:
        """Return the largest resident size so far."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/{self.pid}/status has no VmHWM; this bench needs Linux")

    def memory_bytes(self) -> int:
        """Return the resident size now."""
        return int(self._stats.memory_info().rss)

    def cpu_time_s(self) -> float:
        """Return the CPU time used so far, all threads, user and system."""
        times = self._stats.cpu_times()
        return float(times.user + times.system)

    def check_alive(self) -> None:
        """Raise RuntimeError if the process ended."""
        if self._process.poll() is not None:
            tail = "\n".join(self.log.read_text().splitlines()[-20:])
            raise RuntimeError(f"{self._process.args!r} ended:\n{tail}")

    def stop(self) -> None:
        """Ask the process to end, and wait."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class PipedChild(Child):
    """A process that answers lines of JSON on its standard input by such lines."""

    def ask(self, command: str, **arguments: object) -> dict[str, Any]:
        """Return the answer to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next answer, such as the one that follows the start."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(timeout=_STOP_TIMEOUT_S)
            self.check_alive()
        answer: dict[str, Any] = json.loads(line)
        return answer


class Server(Child):
    """The embedded server, `python -m tinsmith_local`, with one base model named `bench`.

    Args:
        folder: Its data, state and log go below it.
        model: Directory of the base model.
        num_threads: Threads of one operation.
        flags: Further arguments.
        module: What is run, with arguments that come before those of the server.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        num_threads: int,
        flags: Sequence[str] = (),
        module: Sequence[str] = ("tinsmith_local",),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._state = folder / "state"
        super().__init__(
            [
                *("-m", *module, "--model", f"bench={model}", "--port", "0"),
                *("--data-dir", str(folder / "data"), "--num-threads", str(num_threads)),
                *("--device", "cpu"),
                *flags,
            ],
            num_threads=num_threads,
            log=folder / "server.log",
            environment={"TINSMITH_STATE_DIR": str(self._state)},
        )

    def wait_ready(self) -> tuple[str, str]:
        """Wait until it serves; return its address and key.

        Raises:
            RuntimeError: If it ends or does not listen in time; the message quotes its log.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not (servers := list_servers(self._state)) or not servers[0].is_running:
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the server did not start; see {self.log}")
            time.sleep(0.02)
        return servers[0].address, servers[0].api_key


def wait_served(client: tinsmith.Client) -> None:
    """Wait until trainer and sampler have registered, which they do after the server listens."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not any(m.trainable and m.sampleable for m in client.list_models()):
        if time.monotonic() > deadline_s:
            raise RuntimeError("trainer and sampler did not register")
        time.sleep(0.05)
