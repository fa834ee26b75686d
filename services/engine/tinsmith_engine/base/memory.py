"""How the process holds memory that the engine frees.

Each operation allocates and frees the same tens of megabytes. glibc gives large blocks back to
the system at once, and takes them anew page by page. That costs a step 10 % and more of its
time.
"""

from __future__ import annotations

import ctypes
import platform

import torch

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# The largest value that glibc takes; a larger one is ignored without a word.
_LARGEST_MMAP_THRESHOLD = 32 << 20
_OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory does not suffice; the CPU's is a plain one."""
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        phrase in text for phrase in _OUT_OF_MEMORY_PHRASES
    )


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks for reuse; call it before the first large allocation.

    All threads share one arena: what the engine's thread frees is then there for its next pass, and
    blocks may be as large as the threshold. Does nothing where the C library is another one.
    Changes no result.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 64 << 20),
    )
    for name, value in settings:
        if mallopt(name, value) != 1:
            raise OSError(f"glibc refuses mallopt({name}, {value})")
