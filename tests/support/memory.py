"""Memory of processes, as the kernel counts it."""

from pathlib import Path


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
