"""The inner side of a confined process: bounds first, then requests, one by one.

The kernel holds the bounds. Processor time is granted anew for each request, so that a process that
serves for long is not ended for it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinsmith_runtime.confined.framing import HEAD_BYTES, framed

_MAX_FILES = 64

Handle = Callable[[dict[str, Any]], Any]


def serve(begin: Callable[[dict[str, Any]], Handle]) -> None:
    """Answer requests until there are no more.

    Args:
        begin: Takes the first request; returns what answers the others. What either raises is
            the refusal of that request.
    """
    memory_bytes, cpu_s, start_cpu_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    for kind, bound in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
    ):
        resource.setrlimit(kind, (bound, bound))
    if sys.platform == "linux":
        # Where the memory of the pod ends, this process goes first.
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    handle: Handle | None = None
    while (request := _read(requests)) is not None:
        _grant(cpu_s if handle is not None else start_cpu_s)
        try:
            if handle is None:
                handle, answer = begin(request), None
            else:
                answer = handle(request)
            reply = {"answer": answer}
        except MemoryError:
            # What is left of the memory may not do for the next request.
            return
        except Exception as error:
            reply = {"refusal": str(error) or repr(error)}
        _write(answers, json.dumps(reply).encode())


def _grant(cpu_s: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = usage.ru_utime + usage.ru_stime
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s + cpu_s) + 1, resource.RLIM_INFINITY))


def _read(descriptor: int) -> dict[str, Any] | None:
    head = _read_exactly(descriptor, HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    body = _read_exactly(descriptor, int.from_bytes(head, "big"))
    request: dict[str, Any] = json.loads(body)
    return request


def _read_exactly(descriptor: int, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = os.read(descriptor, size - len(received))
        if not chunk:
            break
        received += chunk
    return bytes(received)


def _write(descriptor: int, body: bytes) -> None:
    left = memoryview(framed(body))
    while left:
        left = left[os.write(descriptor, left) :]
