"""Kills a process at chosen points of its work, and starts it again, until it has died enough."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from tests.support.pods import PodProcess

_POLL_S = 0.05
_GIVES_WAY = (2, 3)
"""Exit codes of a controller that does not reach the cluster, or cannot renew its lease."""
_POINTS = ("controller.write", "controller.wrote")


class Reaper:
    """Keeps a controller running that dies at its writes.

    Args:
        process: The controller; not started yet.
        failpoints: For each of its lives the point at which it dies; after the last it lives on.
            Without any it is only started again when it ended by itself, as a kubelet does.
    """

    def __init__(self, process: PodProcess, failpoints: Iterable[str] = ()) -> None:
        self.num_kills = 0
        self._process = process
        self._failpoints = iter(failpoints)
        self._stopped = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="reaper", daemon=True)

    def __enter__(self) -> Self:
        self._start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join(10)
        self._process.stop()
        assert not self._problem, self._problem

    def _start(self) -> None:
        point = next(self._failpoints, "")
        self._process.start({"TINSMITH_FAILPOINTS": point})

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            if self._process.is_running:
                continue
            code = self._process.wait(1)
            if code == -signal.SIGKILL:
                self.num_kills += 1
            elif code not in _GIVES_WAY:
                self._problem = f"the controller ended with {code}"
                return
            self._start()


def points(seed: int, count: int, most: int = 5) -> Iterator[str]:
    """Yield failpoints: before or after one of the first writes of a life."""
    generator = random.Random(seed)
    for _ in range(count):
        # A life that dies before its first write does nothing, however often.
        number = generator.randint(1, most)
        point = generator.choice(_POINTS)
        yield f"{point}=kill:{number}"
