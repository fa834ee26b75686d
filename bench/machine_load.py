"""How much else the machine did meanwhile, and how long its disk takes for an fsync."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_NUM_FSYNCS = 21


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


def fsync_ms(folder: Path) -> float:
    """Return the median time to append 4 KiB to a file and make it durable."""
    path = folder / "fsync"
    durations_s = []
    with path.open("wb", buffering=0) as file:
        for _ in range(_NUM_FSYNCS):
            begin_s = time.perf_counter()
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            durations_s.append(time.perf_counter() - begin_s)
    path.unlink()
    return round(statistics.median(durations_s) * 1e3, 2)
