"""Runs a program that a model wrote, apart from the environment that asked for it.

`bubblewrap` gives the program namespaces of its own: no network, no processes of others, no files
but the system's, read-only, and an empty `/tmp`. Output, time, memory and processes are bounded.
Where `bubblewrap` is missing or refused by the kernel, a run is refused; nothing falls back by
itself. The mode `none` keeps the bounds alone, for an environment that asks for it by name.
"""

from __future__ import annotations

import os
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith_environment.workers.descendants import descendants_of, kill_tree

BUBBLEWRAP = "bubblewrap"
NONE = "none"
OUTPUT = "output"
TIMEOUT = "timeout"
PROCESSES = "processes"

_MODES = (BUBBLEWRAP, NONE)
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_LOOK_INTERVAL_S = 0.05
_CHUNK_BYTES = 2**16
_CHECK_TIMEOUT_S = 30.0


class SandboxUnavailableError(RuntimeError):
    """No sandbox can be had here; the program was not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """What a program is held to.

    Attributes:
        timeout_s: Seconds from start to end.
        cpu_s: Processor time of each process.
        memory_bytes: Address space of each process.
        disk_bytes: Of `/tmp` as a whole, and of each file.
        output_bytes: Of standard output and standard error together.
        max_processes: That live at once.
    """

    timeout_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 * 2**20
    disk_bytes: int = 64 * 2**20
    output_bytes: int = 2**20
    max_processes: int = 32

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program ended.

    Attributes:
        exit_code: Of the program; negative for a signal, as `subprocess` has it.
        stdout: Its standard output, up to the limit.
        stderr: Its standard error, up to the limit.
        exceeded: `timeout`, `output` or `processes` if that limit ended it; empty otherwise.
    """

    exit_code: int
    stdout: str
    stderr: str
    exceeded: str = ""


def run(
    program: str | Sequence[str],
    *,
    limits: SandboxLimits | None = None,
    stdin: str = "",
    sandbox: str = BUBBLEWRAP,
) -> SandboxResult:
    """Run a program to its end, or to its limits.

    Args:
        program: Python code, or the arguments of a command.
        limits: What it is held to.
        stdin: What it reads.
        sandbox: `bubblewrap`; or `none`, which separates it from nothing.

    Returns:
        What it printed and how it ended.

    Raises:
        SandboxUnavailableError: If there is no `bubblewrap`, or the kernel refuses it.
        ValueError: If the mode is unknown.
    """
    if sandbox not in _MODES:
        raise ValueError(f"sandbox must be one of {', '.join(_MODES)}, got {sandbox!r}")
    limits = limits or SandboxLimits()
    command = [sys.executable, "-I", "-c", program] if isinstance(program, str) else [*program]
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
        tempfile.TemporaryFile() as given,
    ):
        given.write(stdin.encode())
        given.seek(0)
        if sandbox == BUBBLEWRAP:
            wrapped = [*_bubblewrap(limits), *command]
            _check(_bubblewrap(limits))
        else:
            wrapped = command
        process = subprocess.Popen(
            wrapped,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": _PATH, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            cwd=folder,
            start_new_session=True,
            preexec_fn=_limiter(limits),
        )
        try:
            return _watch(process, limits)
        finally:
            kill_tree(process.pid)
            process.wait()


def is_available() -> bool:
    """Return whether `bubblewrap` is installed and the kernel lets it work."""
    try:
        _check(_bubblewrap(SandboxLimits()))
    except SandboxUnavailableError:
        return False
    return True


def _bubblewrap(limits: SandboxLimits) -> list[str]:
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailableError(
            "bubblewrap (bwrap) is not installed, so the program was not run; install it, or ask "
            'for sandbox="none" by name'
        )
    binds: list[str] = []
    interpreter = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}
    folders = [*_SYSTEM_FOLDERS, *sorted(interpreter - {"/", "/usr"})]
    for folder in [*folders, *_SYSTEM_FILES]:
        binds += ["--ro-bind-try", folder, folder]
    return [
        *(path, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        # Before the folders: an environment of Python may lie below /tmp.
        *("--size", str(limits.disk_bytes), "--tmpfs", "/tmp"),
        *binds,
        *("--proc", "/proc", "--dev", "/dev", "--chdir", "/tmp"),
        # What is left to write to is /tmp and /dev/shm, each within the bound.
        *("--size", str(limits.disk_bytes), "--tmpfs", "/dev/shm"),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        # A user namespace of its own would give a program all capabilities again.
        *("--unshare-user", "--disable-userns"),
        *("--clearenv", "--setenv", "PATH", _PATH, "--setenv", "HOME", "/tmp"),
        *("--setenv", "LANG", "C.UTF-8", "--"),
    ]


def _check(wrapper: Sequence[str]) -> None:
    """Raise where the kernel refuses namespaces, which is told from a program that fails."""
    try:
        found = subprocess.run(
            [*wrapper, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CHECK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailableError(f"bubblewrap does not start: {error}") from error
    if found.returncode != 0:
        problem = found.stderr.decode(errors="replace").strip()[:200]
        raise SandboxUnavailableError(
            f"bubblewrap is refused by the system ({problem}), so the program was not run"
        )


def _limiter(limits: SandboxLimits) -> Callable[[], None]:
    wanted = [
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_CORE, 0),
    ]

    def limit() -> None:
        for kind, value in wanted:
            _, hard = resource.getrlimit(kind)
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))

    return limit


def _watch(process: subprocess.Popen[bytes], limits: SandboxLimits) -> SandboxResult:
    """Read what a program prints until it ends or exceeds a limit, which kills it."""
    assert process.stdout is not None
    assert process.stderr is not None
    found: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    deadline_s = time.monotonic() + limits.timeout_s
    exceeded = ""
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
        selector.register(process.stdout, selectors.EVENT_READ, "stdout")
        selector.register(process.stderr, selectors.EVENT_READ, "stderr")
        while not exceeded and (selector.get_map() or process.poll() is None):
            has_ended = process.poll() is not None
            num_read = _read_ready(selector, found)
            exceeded = _exceeded(process.pid, limits, found, deadline_s)
            if has_ended and not num_read:
                # A child that holds the pipe open is no reason to wait.
                break
        if exceeded:
            kill_tree(process.pid)
    left = limits.output_bytes
    texts = []
    for name in ("stdout", "stderr"):
        texts.append(bytes(found[name][:left]).decode(errors="replace"))
        left -= min(left, len(found[name]))
    return SandboxResult(process.wait(), texts[0], texts[1], exceeded)


def _read_ready(selector: selectors.BaseSelector, found: dict[str, bytearray]) -> int:
    """Read what is there, after a short wait for it; return how many bytes."""
    num_read = 0
    if not selector.get_map():
        time.sleep(_LOOK_INTERVAL_S)
        return 0
    for key, _ in selector.select(_LOOK_INTERVAL_S):
        stream = key.fileobj
        chunk = os.read(key.fd, _CHUNK_BYTES)
        found[key.data] += chunk
        num_read += len(chunk)
        if not chunk:
            selector.unregister(stream)
    return num_read


def _exceeded(
    pid: int, limits: SandboxLimits, found: dict[str, bytearray], deadline_s: float
) -> str:
    if sum(map(len, found.values())) > limits.output_bytes:
        return OUTPUT
    if time.monotonic() >= deadline_s:
        return TIMEOUT
    if len(descendants_of(pid)) > limits.max_processes:
        return PROCESSES
    return ""
