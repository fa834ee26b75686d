"""Deadlines, and what all calls know together of a store that is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinsmith_runtime.errors import StorageRefusedError, StorageUnavailableError

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
TRIAL_PAUSE_S = 0.5


class Deadline:
    """The end of a call.

    Args:
        timeout_s: Time from now on.
        clock: Monotonic seconds.
    """

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + timeout_s

    @property
    def left_s(self) -> float:
        """Time that is left; not positive when it is over."""
        return self._end_s - self._clock()

    def extend(self, more_s: float) -> None:
        """Move the end: there is more to do than was known."""
        self._end_s += more_s


class Availability:
    """Keeps calls from waiting one after the other for a store that is known to be away.

    After a call gave up, one call at a time tries the store, once and without retries; the others
    are refused at once. The first answer, whatever it says, ends that.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._problem: str | None = None
        self._next_trial_s = 0.0
        self._is_trying = False

    @contextmanager
    def request(self) -> Iterator[bool]:
        """Send a request within; yields whether it may be sent again if it fails.

        Raises:
            StorageUnavailableError: If the store is known to be away and another call tries it.
        """
        with self._lock:
            problem, may_retry = self._problem, self._problem is None
            if problem is not None:
                if self._is_trying or self._clock() < self._next_trial_s:
                    raise StorageUnavailableError(problem)
                self._is_trying = True
        try:
            yield may_retry
        except StorageUnavailableError as error:
            # A refusal is an answer.
            self._note(None if isinstance(error, StorageRefusedError) else error.message)
            raise
        except BaseException:
            self._note(None)
            raise
        else:
            self._note(None)
        finally:
            if not may_retry:
                with self._lock:
                    self._is_trying = False

    def _note(self, problem: str | None) -> None:
        with self._lock:
            self._problem = problem
            self._next_trial_s = self._clock() + TRIAL_PAUSE_S
