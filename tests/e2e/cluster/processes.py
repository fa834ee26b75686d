"""Processes of the test cluster, which end with this one, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support import outlived


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
        outlived.register(self.pid)

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
            outlived.forget(self.pid)
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
