"""Keeps Ctrl-C out of what has to happen as a whole.

A signal can hit between any two instructions, also between a step that is sent and the count of
steps. A save would then say that it contains one step less than it does. What goes on from it would
train that step twice.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back signals that a program handles until the end of the block; waits belong outside.

    Signals that the program leaves to the system end it at once, as ever: nothing is saved then.
    """
    if threading.current_thread() is not threading.main_thread():
        # Signals are handled by the main thread alone.
        yield
        return
    waiting: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        waiting.append(number)

    try:
        with contextlib.ExitStack() as handlers:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers.callback(signal.signal, number, handler)
                    signal.signal(number, note)
            yield
    finally:
        for missed in dict.fromkeys(waiting):
            signal.raise_signal(missed)
