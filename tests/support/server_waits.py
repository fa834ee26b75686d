"""How long a server kept a caller waiting, whatever else the machine had to do.

Seconds on the wall grow with the load of the machine. The kernel says of each thread how long it
ran, and how long it could have run but got no processor (`/proc/<pid>/task/<tid>/schedstat`). What
was lost by the load is taken off. So a server that stands still is told from a busy machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STEPS_OF_SECOND = 20_000_000
"""Steps of an empty loop that a processor makes in a second, where the bounds were chosen."""
_MEASURED_STEPS = 2_000_000


@dataclass(frozen=True)
class ThreadTimes:
    """What a thread had of the processors.

    Attributes:
        ran_s: How long it ran.
        delayed_s: How long it waited for a processor.
    """

    ran_s: float
    delayed_s: float

    def since(self, before: ThreadTimes | None) -> ThreadTimes:
        """Return what came after an earlier look; None if the thread was not there."""
        if before is None:
            return self
        return ThreadTimes(self.ran_s - before.ran_s, self.delayed_s - before.delayed_s)


Times = Mapping[int, ThreadTimes]


def times_of(pid: int) -> Times:
    """Return the times of the threads of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = _times(task)
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has just ended.
    return found


def own_times() -> ThreadTimes:
    """Return the times of the calling thread."""
    return _times(Path(f"/proc/self/task/{threading.get_native_id()}"))


def waited_s(wall_s: float, server: Times, before: Times, own: ThreadTimes) -> float:
    """Return how long the server itself kept a caller waiting.

    Args:
        wall_s: From question to answer.
        server: Times of its threads after the answer.
        before: The same before the question.
        own: What the caller's thread had meanwhile.

    Returns:
        What is left without all delays; at least what one thread ran, as one that holds the
        interpreter does.
    """
    spent = [times.since(before.get(tid)) for tid, times in server.items()]
    delayed_s = own.delayed_s + sum(each.delayed_s for each in spent)
    busiest_s = max((each.ran_s for each in spent), default=0.0)
    return max(wall_s - delayed_s, min(wall_s, busiest_s), 0.0)


def slowness() -> float:
    """Return how much longer this machine takes for the same work; not its load, at least 1."""
    begin_s = time.thread_time()
    for _ in range(_MEASURED_STEPS):
        pass
    spent_s = time.thread_time() - begin_s
    return max(1.0, spent_s * STEPS_OF_SECOND / _MEASURED_STEPS)


def _times(task: Path) -> ThreadTimes:
    ran, delayed, _ = (task / "schedstat").read_text().split()
    return ThreadTimes(int(ran) / 1e9, int(delayed) / 1e9)
