"""What a reset or a step may take in all, shared by everything that it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Made = TypeVar("Made")


class Deadline:
    """A time that has been allowed, from now on."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ends = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return what is left, at least zero."""
        return max(0.0, self._ends - time.monotonic())

    def run(self, make: Callable[[], Made], name: str) -> Made:
        """Return what a function returns, which runs in a thread of its own.

        Raises:
            TimeoutError: If it does not return in time; its thread is left behind.
        """
        future: Future[Made] = Future()

        def work() -> None:
            try:
                future.set_result(make())
            except BaseException as error:
                # Raised again by the caller.
                future.set_exception(error)

        threading.Thread(target=work, name=name, daemon=True).start()
        if not wait([future], self.left_s()).done:
            raise TimeoutError
        return future.result()
