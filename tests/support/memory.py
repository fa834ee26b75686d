"""Memory of processes, as the kernel counts it."""

import contextlib
import gc
import types
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keep what is in cycles, so that only what nothing refers to is let go."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def num_kept_by_errors(num_bytes: int) -> int:
    """Return how many frames that an error has passed hold so many bytes."""
    return sum(
        any(isinstance(held, bytes) and len(held) >= num_bytes for held in frame.f_locals.values())
        for frame in {
            found.tb_frame for found in gc.get_objects() if type(found) is types.TracebackType
        }
    )


def peak_mib(pid: int) -> float:
    """Return the most resident memory that a process ever had."""
    return _read_mib(pid, "VmHWM:")


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    return _read_mib(pid, "VmRSS:")


def _read_mib(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise LookupError(f"process {pid} has no {field}")
