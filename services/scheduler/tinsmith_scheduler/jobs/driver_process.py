"""The driver of a job as a process of this machine, which may outlive its scheduler.

A driver holds a lock on a file of its folder, inherited from its start and given back by its end in
whatever way. So a scheduler that starts again can tell one that still runs, whose process id it can
signal without fear that somebody else has it by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

LOG = "driver.log"
_LOCK, _PID = "driver.lock", "driver.pid"
_FOLDER_MODE = 0o700


class DriverProcess:
    """The driver of one job, at most one at a time.

    Args:
        folder: Holds its lock, log and files; made at the start.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What it printed, all parts of the job one after the other."""
        return self.folder / LOG

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it.

        Raises:
            OSError: If the command cannot be executed.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=_FOLDER_MODE)
        with (self.folder / _LOCK).open("ab") as lock, self.log.open("ab") as log:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._child = subprocess.Popen(
                list(command),
                env=dict(environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C that is meant for the server reaches the driver as an order to save.
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )
        (self.folder / _PID).write_text(str(self._child.pid))

    def is_running(self) -> bool:
        """Whether it runs, started by this process or by one before."""
        if self._child is not None:
            return self._child.poll() is None
        return self._is_locked()

    @property
    def exit_code(self) -> int | None:
        """What it ended with, 128 and more for a signal; None if this process did not start it."""
        code = self._child.poll() if self._child is not None else None
        return code if code is None or code >= 0 else 128 - code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it and what it started, if it runs."""
        if not self.is_running():
            return
        # There is no id if the scheduler that started it was killed before it wrote that down.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            pid = self._child.pid if self._child is not None else int(self._read_pid())
            os.killpg(pid, number)

    def _is_locked(self) -> bool:
        path = self.folder / _LOCK
        if not path.is_file():
            return False
        with path.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _read_pid(self) -> str:
        return (self.folder / _PID).read_text()
