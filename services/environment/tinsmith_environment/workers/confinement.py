"""What a worker process gives up before it runs any environment, and how a pod hides from it.

The pod is made undumpable: `/proc/<pod>/environ`, its memory and its files are then closed to
processes of the same user. A worker drops all capabilities, so this holds for a pod of root too. It
can gain no privileges, and its limits are hard. Limit: a worker with the pod's user can still
send signals to it; `worker_uid_base` gives workers users of their own.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sys
from dataclasses import asdict, dataclass

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522
_MAX_CAPABILITY = 63
_SIGKILL = 9
_OOM_FIRST = "1000"
_IS_LINUX = sys.platform == "linux"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """Hard limits of one worker and of what it starts; 0 sets none.

    Attributes:
        max_processes: Processes that may live below one worker.
        address_space_bytes: Of each process.
        file_bytes: Of each file that is written.
        open_files: Of each process.
        cpu_s: Processor time of each process.
    """

    max_processes: int = 128
    address_space_bytes: int = 8 * 2**30
    file_bytes: int = 256 * 2**20
    open_files: int = 512
    cpu_s: int = 86_400

    def to_json(self) -> dict[str, int]:
        """Return the limits as a worker is told them."""
        return asdict(self)


def guard_pod() -> None:
    """Close this process to its own user, and adopt what dead workers leave behind.

    Raises:
        OSError: If the kernel refuses.
    """
    if not _IS_LINUX:
        logger.warning("workers are not confined: the system is not Linux")
        return
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def confine(limits: ProcessLimits, *, has_own_user: bool) -> None:
    """Give up what an environment has no use for; called in the worker, before any import of it.

    Args:
        limits: What the worker and its children are held to.
        has_own_user: Whether no other process has the worker's user. The kernel counts processes
            by user, so that it can hold the limit of processes only then.

    Raises:
        OSError: If the kernel refuses.
    """
    os.umask(0o077)
    _limit(resource.RLIMIT_CORE, 0)
    for kind, value in (
        (resource.RLIMIT_AS, limits.address_space_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_NPROC, limits.max_processes if has_own_user else 0),
    ):
        if value:
            _limit(kind, value)
    if not _IS_LINUX:
        return
    # Out of memory takes the worker, not the pod.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_FIRST)
    # All that it starts stays below it, whatever session that opens.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    _drop_capabilities()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # Workers of two projects may have one user.
    _prctl(_PR_SET_DUMPABLE, 0)


def _drop_capabilities() -> None:
    """Empty all sets of capabilities; without them even root cannot look into other processes."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    if os.geteuid() == 0:
        for capability in range(_MAX_CAPABILITY + 1):
            try:
                _prctl(_PR_CAPBSET_DROP, capability)
            except OSError:
                # Past the last one that this kernel knows, or the pod itself may drop none.
                break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    empty = (ctypes.c_uint32 * 6)()
    if _libc().capset(header, empty) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")


def _limit(kind: int, value: int) -> None:
    """Lower a limit for good; one that is lower already stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
