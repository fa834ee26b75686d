"""Processes that end with this one, however it ends.

`PR_SET_PDEATHSIG` would not do: it fires when the thread that started the process ends, and pods
are started by threads. So one small process in a session of its own reads a pipe whose write end
only we have: when the pipe closes, because we ended or were killed, it kills what is registered.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_REAPER = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for pid in alive:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class _Reaper:
    """The register of what must not outlive us."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REAPER],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, sign: str, pid: int) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(f"{sign}{pid}\n".encode())
            self._process.stdin.flush()


@functools.cache
def _reaper() -> _Reaper:
    return _Reaper()


class Process:
    """A process in a session of its own, whose output goes to a file.

    Args:
        argv: Program and arguments.
        log: File that standard output and error are appended to.
        env: The whole environment; None for ours.
    """

    def __init__(
        self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        self._is_registered = True
        _reaper().tell("+", self.pid)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """Return the exit code as a shell would give it (128 + signal), or None while it runs."""
        return self._ended(self._popen.poll())

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, or None if it still runs when the time is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._ended(self._popen.wait(timeout_s))
        return None

    def kill(self) -> None:
        """Kill at once and wait for the end; repeating it changes nothing."""
        if self.poll() is None:
            self._popen.kill()
            self._ended(self._popen.wait(10))

    def tail(self, num_lines: int = 20) -> str:
        """Return the end of what it wrote."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _ended(self, code: int | None) -> int | None:
        if code is None:
            return None
        if self._is_registered:
            self._is_registered = False
            _reaper().tell("-", self.pid)
        return code if code >= 0 else 128 - code


def is_alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
