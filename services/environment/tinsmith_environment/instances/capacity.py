"""How many instances live and are being started, of all projects and of each.

Those that are being started are limited apart: a start takes processor time, and the steps of
those that are played are not to wait for a crowd of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinsmith_environment.instances.instance import InstanceLimits
from tinsmith_runtime.errors import CapacityExhaustedError

_LIVE_RETRY_S = 5.0
_STARTING_RETRY_S = 0.2


class Capacity:
    """Counts instances, and refuses those that are too many.

    Args:
        limits: How many there may be.
        notice_losses: Takes off the count what is lost and was not used since.
    """

    def __init__(self, limits: InstanceLimits, notice_losses: Callable[[], None]) -> None:
        self._limits = limits
        self._notice_losses = notice_losses
        self._num_live: Counter[str] = Counter()
        self._num_starting: Counter[str] = Counter()

    @property
    def num_live(self) -> int:
        """Instances that live."""
        return self._num_live.total()

    @contextmanager
    def starting(self, project: str) -> Iterator[None]:
        """Count an instance that is being started until the context ends.

        Raises:
            CapacityExhaustedError: If too many live, or are being started.
        """
        limits, starting = self._limits, self._num_starting
        _require(starting.total(), limits.max_starting, "the pod", is_start=True)
        _require(
            starting[project], limits.max_project_starting, f"project {project}", is_start=True
        )
        if (
            self.num_live + starting.total() >= limits.max_instances
            or self._num_live[project] + starting[project] >= limits.max_project_instances
        ):
            self._notice_losses()
        _require(self.num_live + starting.total(), limits.max_instances, "the pod")
        _require(
            self._num_live[project] + starting[project],
            limits.max_project_instances,
            f"project {project}",
        )
        starting[project] += 1
        try:
            yield
        finally:
            starting[project] -= 1
            _drop_zero(starting, project)

    def add(self, project: str) -> None:
        """Count an instance that lives."""
        self._num_live[project] += 1

    def remove(self, project: str) -> None:
        """Count it no more."""
        self._num_live[project] -= 1
        _drop_zero(self._num_live, project)


def _require(number: int, limit: int, whose: str, *, is_start: bool = False) -> None:
    if number < limit:
        return
    what = "are being started" if is_start else "are live"
    remedy = "retry in a moment" if is_start else "delete one, or retry later"
    raise CapacityExhaustedError(
        f"{number} environment instances of {whose} {what}, the limit is {limit}; {remedy}",
        retry_after_s=_STARTING_RETRY_S if is_start else _LIVE_RETRY_S,
        limit=limit,
    )


def _drop_zero(counts: Counter[str], project: str) -> None:
    # A project that has none is not remembered.
    if not counts[project]:
        del counts[project]
