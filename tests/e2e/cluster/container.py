"""A container without a container engine: namespaces, and this machine's files as its image.

The process gets what containers get. Its root file system is a layer over this machine's: what it
writes outside its volumes never reaches the machine. It has its volumes at their true paths,
`/dev`, `/proc`, a host name, and a process namespace, in which it is number 1. The network is the
machine's. It takes root: a user namespace may not lay anything over this machine's root.

What changes on the machine below the layer may or may not be seen: files are exchanged in volumes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster.processes import Process, send_signal

_TOOLS_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OWN_MOUNTS = ("/proc", "/sys", "/dev", "/etc")
_POLL_S = 0.005
_FORK_TIMEOUT_S = 10.0

_NSENTER = ("-m", "-p", "-u", "-r", "-w")
# What unshare(1) does, but for its exit code: that of a child which was killed is lost there.
_LAUNCHER = """
import ctypes, os, signal, sys
hostname, *argv = sys.argv[1:]
NEWNS, NEWUTS, NEWPID = 0x20000, 0x4000000, 0x20000000
REC_PRIVATE, PDEATHSIG = 0x44000, 1
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result:
        sys.exit("the container has no namespaces: " + os.strerror(ctypes.get_errno()))
check(libc.unshare(NEWNS | NEWUTS | NEWPID))
check(libc.mount(None, b"/", None, REC_PRIVATE, None))
check(libc.sethostname(hostname.encode(), len(hostname.encode())))
pid = os.fork()
if not pid:
    libc.prctl(PDEATHSIG, signal.SIGKILL)
    os.execv(argv[0], argv)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
os._exit(code if code >= 0 else 128 - code)
"""
_OUTER = """
set -e
pod_path=$PATH; PATH={tools}
mount -t tmpfs -o mode=755 tmpfs {base}
mkdir {base}/upper {base}/work {base}/root
mount -t overlay overlay -o lowerdir=/,upperdir={base}/upper,workdir={base}/work {base}/root
cd {base}/root
mount -t proc proc proc
mount --bind /sys sys
mount -t tmpfs -o mode=755 tmpfs dev
for name in null zero full random urandom tty; do
  : > dev/$name
  mount --bind /dev/$name dev/$name
done
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mkdir dev/shm
mount -t tmpfs -o mode=1777 tmpfs dev/shm
{binds}
export PATH="$pod_path"
exec {chroot} . /bin/sh -c {inner} "$@"
"""
# Targets are made and mounted from the inside, where symbolic links such as /var/run lead to the
# container's files and not to the machine's.
_INNER = """
set -e
pod_path=$PATH; PATH={tools}
{mounts}
mkdir -p {cwd}
: > /.pod/0/started
umount -l /.pod/0
PATH=$pod_path
cd {cwd}
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the machine, and where the container sees it."""

    source: Path
    target: str
    read_only: bool = False


class Container:
    """A running container; it is killed with this process.

    Args:
        folder: For its layer; must be new.
        argv: Program and arguments.
        env: The whole environment.
        mounts: In the order in which they are made.
        hostname: Its host name.
        cwd: Where it starts; made if it does not exist.
        log: What it writes.
    """

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        mounts: Sequence[Mount],
        hostname: str,
        cwd: str,
        log: Path,
    ) -> None:
        self._started = folder / "started"
        base = folder / "layer"
        base.mkdir(parents=True)
        script = _outer_script(base, [Mount(folder, ""), *mounts], cwd)
        self._process = Process(
            [*_launcher(hostname), "/bin/sh", "-c", script, "sh", *argv], log=log, env=env
        )

    @property
    def has_started(self) -> bool:
        """Whether its own program runs, or ran."""
        return self._started.exists() or self.poll() is not None

    @property
    def pid(self) -> int | None:
        """The machine's number of its first process; None once it has ended."""
        end_s = time.monotonic() + _FORK_TIMEOUT_S
        while self.poll() is None and time.monotonic() < end_s:
            number = self._process.pid
            with contextlib.suppress(OSError):
                if children := Path(f"/proc/{number}/task/{number}/children").read_text().split():
                    return int(children[0])
            time.sleep(_POLL_S)
        return None

    def poll(self) -> int | None:
        """Return the exit code (128 + signal where one ended it), or None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM; as in every container, a program without a handler for it ignores it."""
        if (pid := self.pid) is not None:
            send_signal(pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all its processes and wait for their end."""
        if (pid := self.pid) is not None:
            send_signal(pid, signal.SIGKILL)
            if self._process.wait(10) is not None:
                return
        self._process.kill()

    def execute(self, argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command inside.

        Raises:
            subprocess.TimeoutExpired: If it takes longer.
            ProcessLookupError: If the container has ended.
        """
        if (pid := self.pid) is None:
            raise ProcessLookupError("the container has ended")
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        return subprocess.run(
            [_tool("nsenter"), f"--target={pid}", *_NSENTER, "--", *argv],
            env=dict(entry.split("=", 1) for entry in environment if "=" in entry),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@functools.cache
def why_unusable() -> str:
    """Say why no container can be run here; empty if they can."""
    if os.geteuid() != 0:
        return "pods that are processes need root, for their mounts"
    missing = [name for name in ("nsenter", "mount", "chroot") if not _which(name)]
    if missing:
        return f"{', '.join(missing)} missing (Debian: mount, util-linux, coreutils)"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        container = Container(
            folder / "try", ["true"], env={}, mounts=[], hostname="try", cwd="/", log=log
        )
        end_s = time.monotonic() + _FORK_TIMEOUT_S
        while (code := container.poll()) is None and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        container.kill()
        return "" if code == 0 else f"no containers here: {log.read_text().strip()}"


def _launcher(hostname: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, hostname]


def _outer_script(base: Path, mounts: Sequence[Mount], cwd: str) -> str:
    binds = [f"mount --rbind {point} .{point}" for point in _further_mount_points()]
    inner = []
    for number, mount in enumerate(mounts):
        source, is_file = shlex.quote(str(mount.source)), mount.source.is_file()
        make = ": >" if is_file else "mkdir -p"
        binds += ["mkdir -p .pod", f"{make} .pod/{number}", f"mount --rbind {source} .pod/{number}"]
        if not mount.target:
            continue
        target = shlex.quote(mount.target)
        parent = shlex.quote(str(Path(mount.target).parent))
        inner += [
            f"mkdir -p {parent}; [ -e {target} ] || : > {target}"
            if is_file
            else f"mkdir -p {target}",
            f"mount --bind /.pod/{number} {target}",
            f"umount -l /.pod/{number}",
        ]
        if mount.read_only:
            inner.append(f"mount -o remount,bind,ro {target}")
    quoted_cwd = shlex.quote(cwd)
    return _OUTER.format(
        tools=_TOOLS_PATH,
        base=shlex.quote(str(base)),
        binds="\n".join(binds),
        chroot=_tool("chroot"),
        inner=shlex.quote(_INNER.format(tools=_TOOLS_PATH, mounts="\n".join(inner), cwd=quoted_cwd))
        + " sh",
    )


def _further_mount_points() -> list[str]:
    """Return other file systems of this machine: the layer shows only what is on the root's."""
    points: list[str] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4]
        inside = [*_OWN_MOUNTS, *points]
        is_inside = any(f"{point}/".startswith(f"{other}/") for other in inside)
        if point != "/" and "\\" not in point and not is_inside:
            points.append(point)
    return points


def _which(name: str) -> str | None:
    return shutil.which(name, path=_TOOLS_PATH)


def _tool(name: str) -> str:
    found = _which(name)
    if found is None:
        raise FileNotFoundError(
            f"{name} is missing; it belongs to Debian's util-linux or coreutils"
        )
    return found
