"""Processes that end with this one, however it ends.

`PR_SET_PDEATHSIG` would not do: it fires when the thread that started the process ends, and pods
are started by threads. So one small process in a session of its own reads a pipe whose write end
only we have: when the pipe closes, because we ended or were killed, it kills what is registered.
"""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
import threading

_REAPER = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for pid in alive:
    try:
        os.killpg(pid, signal.SIGKILL)
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
        atexit.register(self.close)

    def close(self) -> None:
        """Have what is still registered killed, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def tell(self, sign: str, pid: int) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(f"{sign}{pid}\n".encode())
            self._process.stdin.flush()


@functools.cache
def _reaper() -> _Reaper:
    return _Reaper()


def register(pid: int) -> None:
    """Have the group of a process, which it leads, killed when this process ends."""
    _reaper().tell("+", pid)


def forget(pid: int) -> None:
    """Let the group of a process be: it ended."""
    _reaper().tell("-", pid)
