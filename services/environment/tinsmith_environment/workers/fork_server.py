"""`python -m tinsmith_environment.workers.fork_server`: forks worker processes in milliseconds.

It has imported what workers need, environments too, and forks one worker for each request of the
pod; a new interpreter takes a hundred times as long. It is a process of its own, started with the
variables that workers get, so that its memory holds no secret of the pod.

Importing an environment runs its code, which is why the server gives up what a worker does before
that. Where workers have users of their own it needs its privileges, and imports no environment. A
fork copies one thread only: modules that start threads are imported by each worker instead.

A request comes with the worker's socket. A worker that has ended stays a child until the pod has
heard of that, so that its number is no other process's before.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from tinsmith_environment.workers import process
from tinsmith_environment.workers.closed_folders import close_folders
from tinsmith_environment.workers.confinement import (
    ProcessLimits,
    be_first_out_of_memory,
    confine,
    end_with_parent,
)
from tinsmith_runtime.process_control import hide

MAX_MESSAGE_BYTES = 2**16
_MAX_DESCRIPTORS = 2
_WITHOUT_PRELOAD = "--without-preload"


def main() -> None:
    """Fork workers until the pod closes its end of the socket."""
    told: dict[str, Any] = json.loads(sys.argv[1])
    own_users: bool = told["has_own_user"]
    problem = sys.argv[3] if _WITHOUT_PRELOAD in sys.argv else ""
    if _WITHOUT_PRELOAD not in sys.argv and not own_users:
        try:
            close_folders(told["closed_folders"])
        except OSError as error:
            problem = str(error)
    if own_users:
        end_with_parent()
        be_first_out_of_memory()
        hide()
    else:
        confine(ProcessLimits(**told["limits"]), has_own_user=False, is_fork_server=True)
    modules = [] if own_users or _WITHOUT_PRELOAD in sys.argv else told["modules"]
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException:
            # A worker that imports it answers with the error.
            traceback.print_exc()
    if modules and len(os.listdir("/proc/self/task")) > 1:
        os.execv(sys.executable, [*sys.orig_argv, _WITHOUT_PRELOAD, problem])
    pod = socket.socket(fileno=os.dup(0))
    pod.setblocking(True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # What is shared with workers stays shared: their collections do not touch it.
    gc.collect()
    gc.freeze()
    pod.send(json.dumps({"ready": True, "preloaded": modules, "not_closed": problem}).encode())
    _serve(pod, told)


def _serve(pod: socket.socket, told: Mapping[str, Any]) -> None:
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_out, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([pod.fileno(), wake_in], [], [])
        if pod.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(pod, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
            if not message:
                os._exit(0)
            request = json.loads(message)
            for pid in request.get("reap", ()):
                os.waitpid(pid, os.WNOHANG)
            if "start" in request:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for number in (pod.fileno(), wake_in, wake_out):
                        os.close(number)
                    _become_worker(request, descriptors, told)
                children.add(pid)
                for number in descriptors:
                    os.close(number)
                pod.send(json.dumps({"started": pid}).encode())
        if wake_in not in ready:
            continue
        os.read(wake_in, MAX_MESSAGE_BYTES)
        ended = [[pid, code] for pid in children if (code := _exit_code(pid)) is not None]
        children.difference_update(pid for pid, _ in ended)
        for first in range(0, len(ended), 1000):
            pod.send(json.dumps({"ended": ended[first : first + 1000]}).encode())


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child that has ended, negative for a signal; it is not reaped."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _become_worker(
    request: Mapping[str, Any], descriptors: list[int], told: Mapping[str, Any]
) -> NoReturn:
    """Be a worker from now on; called in the child."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        calls, output = descriptors
        os.dup2(calls, 0)
        os.dup2(output, 2)
        for number in descriptors:
            os.close(number)
        if (uid := request["start"]["uid"]) is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        if "numpy.random" in sys.modules:
            # As `random` does by itself: no two workers draw the same numbers.
            sys.modules["numpy.random"].seed()
        process.serve(told)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
