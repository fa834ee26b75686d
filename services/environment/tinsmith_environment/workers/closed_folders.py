"""Folders that are empty for worker processes, although their user may read them.

Where the server and the workers have one user, file modes keep nothing apart. So the process that
workers are forked from gets a mount namespace of its own, in which an empty folder lies on each of
these. Such a namespace comes with one of users, which closes the processes of others as well.
Workers cannot take it away: a namespace below it inherits the mounts locked.

Landlock cannot take its place. It allows what it lists, so that new files beside the path to a
closed folder could not be read. And a process with rules for files may mount nothing, which the
sandbox of a worker does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from tinsmith_runtime.process_control import libc

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_READ_ONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_RECURSIVE, _MS_PRIVATE = 0x4000, 0x40000


def close_folders(folders: Sequence[str]) -> None:
    """Make folders empty for this process and those that it starts.

    Call it with one thread, and before the process hides.

    Raises:
        OSError: If the system gives its user no such namespace.
    """
    if not folders:
        return
    user, group = os.geteuid(), os.getegid()
    _check(libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    # Mounts of this namespace stay in it.
    _mount(None, "/", None, _MS_RECURSIVE | _MS_PRIVATE)
    for folder in folders:
        flags = _MS_READ_ONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        _mount("tmpfs", os.path.realpath(folder), "tmpfs", flags)
    # The current folder is held as it was before the mounts: what it names is looked up anew.
    try:
        os.chdir(os.getcwd())
    except FileNotFoundError:
        os.chdir("/")


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    texts = (None if text is None else text.encode() for text in (source, target, kind))
    _check(libc().mount(*texts, ctypes.c_ulong(flags), None), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
