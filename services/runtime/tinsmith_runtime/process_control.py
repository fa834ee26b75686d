"""What a process gives up on Linux, and what of it others of its user may see."""

from __future__ import annotations

import ctypes
import os
import sys

IS_LINUX = sys.platform == "linux"
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38


def hide() -> None:
    """Close the memory, the variables and the files of this process to others of its user.

    Raises:
        OSError: If the kernel refuses.
    """
    prctl(_PR_SET_DUMPABLE, 0)


def gain_no_privileges() -> None:
    """Let no program that this process starts have more rights than it has.

    Raises:
        OSError: If the kernel refuses.
    """
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def prctl(option: int, value: int) -> None:
    """Change how the kernel treats this process.

    Raises:
        OSError: If the kernel refuses.
    """
    if libc().prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def libc() -> ctypes.CDLL:
    """Return the C library of this process."""
    return ctypes.CDLL(None, use_errno=True)
