"""What a worker process gives up before it runs any environment, and how a pod hides from it.

The pod is made undumpable: `/proc/<pod>/environ`, its memory and its files are then closed to
processes of the same user. A worker drops its capabilities, so this holds for a pod of root too. It
can gain no privileges, and its limits are hard. Landlock keeps its signals to itself and what it
started. Limit: a kernel before 6.12 cannot do that; `worker_uid_base` gives workers users of their
own there.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
from dataclasses import asdict, dataclass

from tinsmith_runtime.process_control import (
    IS_LINUX,
    gain_no_privileges,
    hide,
    libc,
    prctl,
)

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522
_MAX_CAPABILITY = 63
_CAP_SETFCAP = 31
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_VERSION = 1
_LANDLOCK_SCOPE_ABI = 6
# Abstract sockets of others, and signals to them.
_LANDLOCK_SCOPES = 1 | 2
_SIGKILL = 9
_OOM_SCORE_PATH = "/proc/self/oom_score_adj"
_OOM_FIRST = "1000"


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


def guard_pod(*, has_own_users: bool) -> None:
    """Close this process to its own user, and adopt what dead workers leave behind.

    Args:
        has_own_users: Whether workers have users of their own.

    Raises:
        OSError: If the kernel refuses.
    """
    if not IS_LINUX:
        logger.warning("workers are not confined: the system is not Linux")
        return
    if not (has_own_users or has_signal_scope()):
        logger.warning("workers may send signals to the pod: set worker_uid_base")
    hide()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def allow_open_files(number: int) -> None:
    """Let this process have so many files open, if it may allow itself that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    if hard != resource.RLIM_INFINITY:
        number = min(number, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def confine(limits: ProcessLimits, *, has_own_user: bool, is_fork_server: bool = False) -> None:
    """Give up what an environment has no use for; called before any import of it.

    A worker of a confined fork server calls this again: its signals then stay below itself.

    Args:
        limits: What the process and its children are held to.
        has_own_user: Whether no other process has its user. The kernel counts processes by user,
            so that it can hold the limit of processes only then.
        is_fork_server: Whether workers are to be forked from it. What they leave behind is the
            pod's then.

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
    if not IS_LINUX:
        return
    be_first_out_of_memory()
    # No environment has a use for one; what has no right to one is known by it (`descendants.py`).
    # Where the kernel has no such limit, as gVisor's, what workers leave behind ends with the pod.
    with contextlib.suppress(OSError, ValueError):
        _limit(resource.RLIMIT_MSGQUEUE, 0)
    if not is_fork_server:
        # All that it starts stays below it, whatever session that opens.
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    end_with_parent()
    _drop_capabilities()
    gain_no_privileges()
    if has_signal_scope():
        _keep_signals()
    # Workers of two projects may have one user.
    hide()


def be_first_out_of_memory() -> None:
    """Let the kernel end this process, and those that it forks, before the pod.

    Raises:
        OSError: If the kernel refuses.
    """
    with open(_OOM_SCORE_PATH) as file:
        if file.read().strip() == _OOM_FIRST:
            # Inherited; a process that is hidden could not set it.
            return
    with open(_OOM_SCORE_PATH, "w") as file:
        file.write(_OOM_FIRST)


def end_with_parent() -> None:
    """End this process when the thread that started it does.

    Raises:
        OSError: If the kernel refuses.
    """
    prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def has_signal_scope() -> bool:
    """Return whether the kernel can keep a worker from sending signals to others."""
    if not IS_LINUX:
        return False
    size, flags = ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION)
    version: int = libc().syscall(_LANDLOCK_CREATE_RULESET, None, size, flags)
    return version >= _LANDLOCK_SCOPE_ABI


def _keep_signals() -> None:
    """Let signals and abstract sockets reach only what this process starts.

    Raises:
        OSError: If the kernel refuses.
    """
    # Rights of files, rights of networks, scopes.
    attributes = (ctypes.c_uint64 * 3)(0, 0, _LANDLOCK_SCOPES)
    size, flags = ctypes.c_size_t(ctypes.sizeof(attributes)), ctypes.c_uint32(0)
    ruleset = libc().syscall(_LANDLOCK_CREATE_RULESET, attributes, size, flags)
    if ruleset < 0 or libc().syscall(_LANDLOCK_RESTRICT_SELF, ruleset, flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock: {os.strerror(number)}")
    os.close(ruleset)


def _drop_capabilities() -> None:
    """Empty the sets of capabilities; without them even root cannot look into other processes.

    A worker of root keeps `CAP_SETFCAP`, without which the kernel gives root no user namespace.
    It concerns files of its own, which root may mark as it likes anyway.
    """
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    if os.geteuid() == 0:
        for capability in range(_MAX_CAPABILITY + 1):
            if capability == _CAP_SETFCAP:
                continue
            try:
                prctl(_PR_CAPBSET_DROP, capability)
            except OSError:
                # Past the last one that this kernel knows, or the pod itself may drop none.
                break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    # Effective, permitted and inheritable ones: the low words, then the high ones.
    held = (ctypes.c_uint32 * 6)()
    left = (ctypes.c_uint32 * 6)()
    is_read = libc().capget(header, held) == 0
    if os.geteuid() == 0:
        left[0] = left[1] = held[1] & (1 << _CAP_SETFCAP)
    if not is_read or libc().capset(header, left) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"capabilities: {os.strerror(number)}")


def _limit(kind: int, value: int) -> None:
    """Lower a limit for good; one that is lower already stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
