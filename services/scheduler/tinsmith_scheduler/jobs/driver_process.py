"""The driver of a job as a process of this machine, which may outlive its scheduler.

A driver inherits a lock on a file of its folder; its end releases the lock, even after a kill. So a
scheduler that starts again can tell whether the driver still runs. Only then may it signal the
process id, which another process could have by now.
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
TERMINATION_LOG = "termination.log"
_LOCK, _PID, _POD = "driver.lock", "driver.pid", "driver.pod"
_TAIL_BYTES = 2048
"""Of a log, that stand for a termination message; as many as a kubelet takes."""
_FOLDER_MODE = 0o700


class DriverProcess:
    """The driver of one job, at most one at a time.

    Args:
        folder: Holds its lock, log and files; made at the start.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._kill_time_s: float | None = None

    @property
    def pod(self) -> str:
        """Name of the pod that it was started as last; empty if that pod was deleted."""
        path = self.folder / _POD
        return path.read_text() if path.is_file() else ""

    @property
    def start_time_s(self) -> float:
        """When it was started last, in seconds since the epoch."""
        return (self.folder / _POD).stat().st_mtime

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop by this process."""
        return self._kill_time_s is not None

    @property
    def log(self) -> Path:
        """What it printed, all parts of the job one after the other."""
        return self.folder / LOG

    def start(self, pod: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it as a pod.

        The name of the pod is stored before: a process that a killed scheduler started, or was
        about to start, is known by it.

        Raises:
            OSError: If the command cannot be executed.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=_FOLDER_MODE)
        self._child = self._kill_time_s = None
        (self.folder / TERMINATION_LOG).unlink(missing_ok=True)
        (self.folder / _POD).write_text(pod)
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

    def stop(self, now_s: float, grace_s: float) -> None:
        """Tell it to save and end, and remember when that has to be done."""
        self._kill_time_s = now_s + grace_s
        self.send_signal(signal.SIGTERM)

    def kill_if_late(self, now_s: float) -> None:
        """Kill it if it was told to stop and took longer than it had."""
        if self._kill_time_s is not None and now_s > self._kill_time_s:
            self.send_signal(signal.SIGKILL)

    def delete_pod(self) -> None:
        """Forget that it was started; its log and files stay."""
        self._child = self._kill_time_s = None
        (self.folder / _POD).unlink(missing_ok=True)

    def read_end(self) -> tuple[str, str]:
        """Return the termination message of a process that ended, and the end of its log."""
        path = self.folder / TERMINATION_LOG
        message = path.read_text(errors="replace") if path.is_file() else ""
        if not self.log.is_file():
            return message, ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return message, file.read().decode(errors="replace")

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
