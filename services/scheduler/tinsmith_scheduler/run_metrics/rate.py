"""How fast the projects may record: a token bucket for each."""

from __future__ import annotations

from collections.abc import Callable

from tinsmith_runtime.errors import RateLimitedError

_BURST_S = 60.0
"""What of its rate a project may save up: a client that was cut off sends all at once."""
_MAX_PROJECTS = 10_000
"""Projects that are kept in mind; one that has not recorded for a minute has a full bucket."""


class PointRate:
    """Limits the points that each project records in a second.

    Args:
        points_per_s: How many.
        clock: Monotonic seconds.
    """

    def __init__(self, points_per_s: float, *, clock: Callable[[], float]) -> None:
        self._points_per_s = points_per_s
        self._clock = clock
        self._full_at_s: dict[str, float] = {}

    def take(self, project: str, num_points: int) -> None:
        """Take points of a project's rate.

        Raises:
            RateLimitedError: If there are not so many left; nothing was taken.
        """
        now_s = self._clock()
        full_at_s = max(self._full_at_s.get(project, now_s), now_s)
        after_s = full_at_s + num_points / self._points_per_s
        # More than a bucket holds is let through once it is full, or it could never be recorded.
        wait_s = min(after_s - now_s - _BURST_S, full_at_s - now_s)
        if wait_s > 0:
            raise RateLimitedError(
                f"project {project} records more than {self._points_per_s:g} points of metrics a "
                "second; record fewer metrics, or not at every step",
                retry_after_s=max(wait_s, 1.0),
                project=project,
            )
        if len(self._full_at_s) >= _MAX_PROJECTS:
            self._full_at_s = {
                each: full_s for each, full_s in self._full_at_s.items() if full_s > now_s
            }
        self._full_at_s[project] = after_s
