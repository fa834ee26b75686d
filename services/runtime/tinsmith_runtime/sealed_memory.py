"""Memory that is written once, sealed, and then mapped by processes of the same user and machine.

The kernel keeps the seals: what was checked once stays as it is, and a mapping can neither change
nor shrink. The memory has no name in any file system and is gone with its last process. Where the
kernel has none of that, memory is private to its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE", "F_SEAL_SEAL")


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """Where another process finds sealed memory.

    Attributes:
        pid: Its process, as that one and its neighbours number it.
        descriptor: File descriptor of that process.
        inode: Tells the memory from any other that may have the number of the descriptor by now.
    """

    pid: int
    descriptor: int
    inode: int


class SealedMemory:
    """Bytes that nothing changes any more.

    Attributes:
        view: All of them, read-only.
        location: Where other processes find them; None if they cannot.
    """

    def __init__(self, parts: Iterable[memoryview], size_bytes: int) -> None:
        """Copy parts into memory, one behind another, and seal it.

        Raises:
            OSError: If there is no room.
            ValueError: If the parts do not have this size together.
        """
        self._descriptor = _create() if size_bytes else None
        self.location: MemoryLocation | None = None
        try:
            if self._descriptor is None:
                self.view = memoryview(b"".join(parts)).toreadonly()
            else:
                self.view = _fill(self._descriptor, parts, size_bytes)
                self.location = MemoryLocation(
                    os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino
                )
            if self.view.nbytes != size_bytes:
                raise ValueError(f"the parts have {self.view.nbytes} bytes, not {size_bytes}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the memory out of reach of others; its readers go on. May be called twice."""
        self.location = None
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()


def map_sealed(location: MemoryLocation, size_bytes: int) -> memoryview:
    """Return the sealed memory of another process; writes to it would be seen here alone.

    Raises:
        OSError: If it is not there, is other memory or of another user or size, or not sealed.
    """
    path = f"/proc/{location.pid:d}/fd/{location.descriptor:d}"
    with open(path, "rb", buffering=0, opener=_open_existing) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not memory of this user")
        if found.st_ino != location.inode:
            raise OSError(f"{path} is other memory by now")
        if found.st_size != size_bytes:
            raise OSError(f"{path} has {found.st_size} bytes, not {size_bytes}")
        # A file on a disk has no seals: the call fails, and shared memory without them has none.
        if fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS) & _all_seals() != _all_seals():
            raise PermissionError(f"{path} is not sealed")
        return memoryview(mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_COPY))


@functools.cache
def memory_domain() -> str:
    """Return what processes share that can map each other's memory; empty if none can."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    if not hasattr(os, "memfd_create"):
        return ""
    return f"{boot_id}/{processes}/{os.geteuid()}"


def _create() -> int | None:
    """Return a descriptor of new memory, or None where the kernel has no such thing."""
    if not memory_domain():
        return None
    try:
        return os.memfd_create("tinsmith", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None


def _fill(descriptor: int, parts: Iterable[memoryview], size_bytes: int) -> memoryview:
    offset = 0
    for part in parts:
        rest = part.cast("B")
        while rest.nbytes:
            written = os.pwrite(descriptor, rest, offset)
            offset, rest = offset + written, rest[written:]
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _all_seals())
    if offset != size_bytes:
        raise ValueError(f"the parts have {offset} bytes, not {size_bytes}")
    return memoryview(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ))


def _all_seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)


def _open_existing(path: str, flags: int) -> int:
    # Neither a terminal nor a pipe that the descriptor may be is waited for.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
