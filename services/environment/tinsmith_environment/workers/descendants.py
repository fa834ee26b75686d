"""Processes below a worker: counted, and ended with it, in whatever session they are.

A worker adopts what its children leave behind, so all of them are in its tree while it lives. What
a dead worker leaves is adopted by the pod. The pod may have started other processes: on a laptop it
is one with all pods. So workers have a mark that no process can take off: none of them, nor what
they start, may have a queue of messages (`confinement.py`). Limit: where the pod has that mark
itself, its unknown children are ended only if it is the first process of a container.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

_PROC = Path("/proc")
_MAX_PASSES = 100


def descendants_of(root: int) -> set[int]:
    """Return the processes below a process, without it."""
    return _below(root, _children()) if _has_children(root) else set()


def count_descendants(roots: Sequence[int]) -> list[int]:
    """Return how many processes are below each of some."""
    parents = [root for root in roots if _has_children(root)]
    children = _children() if parents else {}
    return [len(_below(root, children)) if root in parents else 0 for root in roots]


def num_threads_of_system() -> int:
    """Return how many threads there are, by one short read; 0 where it is not known."""
    try:
        with open(_PROC / "loadavg", "rb") as file:
            return int(file.read().split()[3].partition(b"/")[2])
    except (OSError, ValueError, IndexError):
        return 0


def _has_children(pid: int) -> bool:
    """Return whether a process has children; most workers have none, and this is a short look."""
    folder = f"{_PROC}/{pid}/task"
    try:
        for thread in os.listdir(folder):
            with open(f"{folder}/{thread}/children", "rb") as file:
                if file.read(1):
                    return True
    except OSError:
        # A thread has ended, or the kernel has no such file.
        return os.path.exists(folder)
    return False


def _below(root: int, children: Mapping[int, Sequence[int]]) -> set[int]:
    found: set[int] = set()
    open_pids = [root]
    while open_pids:
        for child in children.get(open_pids.pop(), []):
            if child not in found:
                found.add(child)
                open_pids.append(child)
    return found


def kill_tree(root: int) -> None:
    """End a process and all below it.

    They are stopped first, the root before the others: what is stopped starts no more.
    """
    _signal(root, signal.SIGSTOP)
    stopped: set[int] = set()
    for _ in range(_MAX_PASSES):
        fresh = descendants_of(root) - stopped
        if not fresh:
            break
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        _signal(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(root, signal.SIGKILL)
    _signal(root, signal.SIGKILL)


def end_orphans(known: Collection[int]) -> int:
    """End what dead workers left to this process, and reap it.

    Args:
        known: Children of this process that are workers.

    Returns:
        How many processes were ended.
    """
    own = os.getpid()
    is_alone = own == 1 or not _is_marked(own)
    num_ended = 0
    for pid, parent in _parents().items():
        if parent != own or pid in known or not is_alone or not _is_marked(pid):
            continue
        kill_tree(pid)
        num_ended += 1
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return num_ended


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    return children


def _parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir(_PROC):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    # The name, in brackets, may hold any characters.
                    fields = (_PROC / entry / "stat").read_bytes().rpartition(b")")[2].split()
                    found[int(entry)] = int(fields[1])
    return found


def _is_marked(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "limits").read_bytes().splitlines():
            if line.startswith(b"Max msgqueue size "):
                return line.split()[-2] == b"0"
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
