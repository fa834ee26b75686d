"""An environment that attacks the pod and its neighbours; the action says how. Run by workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tinsmith_environment import (
    Action,
    Environment,
    JsonValue,
    Observation,
    StepResult,
    sandbox,
)

MARK = "canary-7f3a"
left_by_an_episode: list[str] = []


class HostileEnvironment(Environment):
    """Does what the action says."""

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        return Observation.of_user("go")

    def step(self, action: Action) -> StepResult:
        name, _, argument = (action.text or "").partition(" ")
        info: dict[str, JsonValue] = {"pid": os.getpid(), "uid": os.getuid()}
        match name:
            case "look":
                info["found"] = look_for_secrets(int(argument))
            case "remember":
                info["before"] = list(left_by_an_episode)
                left_by_an_episode.append(argument)
            case "forks":
                while True:
                    if os.fork() == 0:
                        time.sleep(600)
            case "allocate":
                info["length"] = len(bytearray(64 * 2**30))
            case "prints":
                for _ in range(int(argument)):
                    sys.stdout.write("x" * 2**16)
                sys.stdout.flush()
            case "says":
                sys.stdout.write(argument.encode().decode("unicode_escape"))
                sys.stdout.flush()
            case "sleeps":
                time.sleep(600)
            case "file":
                with Path(argument).open("wb") as file:
                    for _ in range(1024):
                        file.write(b"x" * 2**20)
            case "descriptors":
                info["count"] = len([os.open(os.devnull, os.O_RDONLY) for _ in range(100_000)])
            case "detaches":
                start_detached(argument)
            case "detaches-and-dies":
                start_detached(argument)
                os.kill(os.getpid(), signal.SIGKILL)
            case "detaches-and-hangs":
                start_detached(argument)
                time.sleep(600)
            case "signals":
                info["reached"] = signal_all([int(each) for each in argument.split()])
            case "reads":
                info["found"] = [str(each) for each in Path(argument).rglob("*")]
            case "uncovers":
                command = f"echo tries; umount {argument}; ls -A {argument}"
                shell = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command]
                info["output"] = subprocess.run(
                    shell, capture_output=True, text=True, check=False
                ).stdout
            case "sandbox":
                result = sandbox.run(
                    "import os; print([e.name for e in os.scandir('/tmp') if not e.is_dir()])"
                )
                info["output"] = result.stdout + result.stderr
            case "reply":
                return StepResult(Observation.of_user("x" * int(argument)), 0.0, False)
        return StepResult(Observation(), 0.0, False, info)


def start_detached(pid_file: str) -> None:
    """Start a process of a session of its own, whose parent is gone."""
    code = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "open(sys.argv[1] + '~', 'w').write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '~', sys.argv[1])\n"
        "time.sleep(600)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code, pid_file], env={}, check=True)
    while not Path(pid_file).exists():
        time.sleep(0.01)


def look_for_secrets(pod: int) -> list[JsonValue]:
    """Return where the canary can be read: variables, files and memory of all processes."""
    found: list[JsonValue] = []
    if any(MARK in value for value in os.environ.values()):
        found.append("os.environ")
    others = {pod, os.getppid(), *(int(name) for name in os.listdir("/proc") if name.isdigit())}
    others.discard(os.getpid())
    for pid in sorted(others):
        for name in ("environ", "cmdline", "mem"):
            try:
                if MARK.encode() in read_all(pid, name):
                    found.append(f"{pid}/{name}")
            except OSError:
                continue
        if pid == pod:
            found += [f"{pid}/fd/{number}" for number in range(64) if opens(pid, number)]
    # Standard streams, and the two pipes that answers travel on.
    if len(os.listdir("/proc/self/fd")) > 6:
        found.append("inherited descriptors")
    return found


def signal_all(pids: list[int]) -> list[JsonValue]:
    """Send a signal to processes; return which could be reached."""
    reached: list[JsonValue] = []
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except OSError:
            continue
        reached.append(pid)
    child = subprocess.Popen(["sleep", "600"])
    child.kill()
    if child.wait() != -signal.SIGKILL:
        reached.append("not its own child")
    return reached


def opens(pid: int, number: int) -> bool:
    """Return whether a descriptor of another process can be opened or named."""
    try:
        os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return False
    return True


def read_all(pid: int, name: str) -> bytes:
    """Return a file of a process; of its memory, what could be read of the heap."""
    if name != "mem":
        return Path(f"/proc/{pid}/{name}").read_bytes()
    # `look` runs in the pod's own tree; opening its memory is refused before any byte is read.
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in maps:
            if "[heap]" in line or "[stack]" in line:
                first, _, last = line.split()[0].partition("-")
                memory.seek(int(first, 16))
                data = memory.read(int(last, 16) - int(first, 16))
                if MARK.encode() in data:
                    return data
    return b""
