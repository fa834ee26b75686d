"""The one thread that computes masks, at which projects take turns.

A mask can take a hundred times as long as that of an ordinary form. So a project with many of them
delays another one's by one mask, and not by all that it waits for. What waits for a mask is held
here by a weak reference: a sample that ended, or whose caller left, takes no turn and no memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol


class MaskWork(Protocol):
    """A sample that wants its next mask."""

    def compute(self) -> bool:
        """Compute it; return whether there is one."""


class MaskQueue:
    """Work for masks, first come first served within a project."""

    def __init__(self) -> None:
        # Masks wait for nothing but a core: more threads would take the model's own.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-masks")
        self._lock = threading.Lock()
        # The project that had its turn longest ago is first.
        self._waiting: dict[str, deque[_Entry]] = {}

    def submit(self, project: str, work: MaskWork) -> Future[bool]:
        """Queue work and return the future of its result; never done if `work` is let go of.

        Args:
            project: Whose turn it takes.
            work: Kept by the caller until the future is done.
        """
        result: Future[bool] = Future()
        with self._lock:
            self._waiting.setdefault(project, deque()).append((weakref.ref(work), result))
        self._thread.submit(self._run_next)
        return result

    def _run_next(self) -> None:
        """Run what has its turn; there are as many calls as there is work."""
        with self._lock:
            project = next(iter(self._waiting))
            entries = self._waiting.pop(project)
            kept, result = entries.popleft()
            if entries:
                self._waiting[project] = entries
        work = kept()
        if work is None:
            return
        try:
            result.set_result(work.compute())
        except BaseException as error:
            result.set_exception(error)


_Entry = tuple[weakref.ref[MaskWork], Future[bool]]
