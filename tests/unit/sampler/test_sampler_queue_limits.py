"""How many sequences of a project, and of all, may wait."""

from __future__ import annotations

import pytest

from tinsmith_runtime.errors import QueueFullError
from tinsmith_sampler.requests.queue_limits import QueueLimits


def test_a_project_meets_its_own_limit() -> None:
    limits = QueueLimits(16, 4)
    limits.enter("p", 3)
    with pytest.raises(QueueFullError, match="of the project wait, at most 4 may"):
        limits.enter("p", 2)
    limits.enter("p", 1)
    limits.enter("q", 4)
    limits.leave("p", 4)
    limits.enter("p", 4)


def test_those_that_filled_the_pod_leave_an_equal_part_to_each_other_project() -> None:
    limits = QueueLimits(8, 4)
    limits.enter("p", 4)
    limits.enter("q", 4)
    # Three projects share eight places: two for each.
    limits.enter("r", 2)
    with pytest.raises(QueueFullError, match="of all projects wait"):
        limits.enter("r", 1)
    with pytest.raises(QueueFullError, match="of all projects wait"):
        limits.enter("s", 3)
    limits.leave("p", 4)
    limits.enter("s", 2)


def test_the_whole_stays_bounded_over_any_number_of_projects() -> None:
    limits = QueueLimits(64, 64)
    num_accepted = 0
    for number in range(1000):
        try:
            limits.enter(f"p{number}", 1)
        except QueueFullError:
            continue
        num_accepted += 1
    assert num_accepted == 64
