"""How much else the machine did meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil


class NoiseMeter:
    """Counts CPU time of other processes between `__init__` and `describe`.

    Args:
        own_cpu_time_s: CPU time that the benchmark's processes used so far.
    """

    def __init__(self, own_cpu_time_s: Callable[[], float]) -> None:
        self._own_cpu_time_s = own_cpu_time_s
        self._begin = (time.monotonic(), self._busy_s(), self._steal_s(), own_cpu_time_s())

    def describe(self) -> dict[str, float]:
        """Return the cores that others and the hypervisor took, on average since the start."""
        begin_s, busy_s, steal_s, own_s = self._begin
        elapsed_s = time.monotonic() - begin_s
        others_s = self._busy_s() - busy_s - (self._own_cpu_time_s() - own_s)
        return {
            "duration_s": round(elapsed_s, 1),
            "cores_used_by_others": round(max(0.0, others_s) / elapsed_s, 2),
            "cores_stolen": round((self._steal_s() - steal_s) / elapsed_s, 2),
        }

    def _busy_s(self) -> float:
        times = psutil.cpu_times()
        return float(times.user + times.nice + times.system + times.irq + times.softirq)

    def _steal_s(self) -> float:
        return float(psutil.cpu_times().steal)


def process_cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, ended threads included, to the nanosecond.

    `psutil` counts in ticks of ten milliseconds, which is longer than what is told apart here.
    """
    clock = ctypes.c_int()
    problem = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if problem:
        raise OSError(problem, os.strerror(problem))
    return time.clock_gettime(clock.value)


def thread_cpu_s(pid: int) -> dict[int, float]:
    """Return the CPU time of each living thread of a process so far, by thread id."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            nanoseconds = (folder / "schedstat").read_text().split()[0]
            found[int(folder.name)] = int(nanoseconds) / 1e9
    return found


def peak_memory_bytes() -> int:
    """Return the largest resident size of this process since `forget_peak_memory`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; this bench needs Linux")


def forget_peak_memory() -> None:
    """Let the largest resident size of this process begin anew, at what it is now."""
    Path("/proc/self/clear_refs").write_text("5")
