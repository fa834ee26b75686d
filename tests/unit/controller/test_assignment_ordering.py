from __future__ import annotations

import pytest
from tests.unit.controller.assignment_cases import decided, job, nodes, pool

from tinsmith_controller.assignment.types import QueueConfig, Share, Workload


def order(workloads: list[Workload], policy: QueueConfig | None = None) -> list[str]:
    """Return the names in the order in which they were given nodes; there is enough for all."""
    return [key.name for key in decided(workloads, nodes(20), policy).assign]


@pytest.mark.parametrize(
    ("workloads", "expected"),
    [
        pytest.param([job("b", [1]), job("a", [1])], ["a", "b"], id="name"),
        pytest.param([job("a", [1]), job("b", [1], waited_s=9)], ["b", "a"], id="waiting"),
        pytest.param(
            [job("a", [1], waited_s=9), job("b", [1], priority=1)], ["b", "a"], id="priority"
        ),
        pytest.param(
            [job("a", [1], priority=9), job("b", [1], on={"n0": 1})], ["b", "a"], id="replacement"
        ),
        pytest.param(
            [job("a", [1], priority=9), pool("b", [1], on={"n0": 1})], ["a", "b"], id="pool-grows"
        ),
        pytest.param(
            [
                job("a", [1], waited_s=9),
                job("b", [1], project="q"),
                job("h", on={"n0": 1}, ran_s=99),
            ],
            ["b", "a"],
            id="project-with-less",
        ),
        pytest.param(
            [job("a", [1], waited_s=9), pool("b", [1]), job("h", on={"n0": 1}, ran_s=99)],
            ["b", "a"],
            id="pools-have-no-share",
        ),
        pytest.param(
            [
                *(job(f"a{i}", [2], waited_s=9 - i) for i in range(3)),
                *(job(f"b{i}", [1], project="q") for i in range(3)),
            ],
            ["a0", "b0", "b1", "a1", "b2", "a2"],
            id="share-is-counted-again-after-each",
        ),
    ],
)
def test_order(workloads: list[Workload], expected: list[str]) -> None:
    assert order(workloads) == expected
    assert order(workloads[::-1]) == expected


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        pytest.param(2.0, ["a0", "b0", "b1", "a1", "b2", "b3"], id="twice"),
        pytest.param(1.0, ["a0", "b0", "a1", "b1", "b2", "b3"], id="equal"),
        pytest.param(0.0, ["a0", "a1", "b0", "b1", "b2", "b3"], id="none"),
        pytest.param(float("nan"), ["a0", "a1", "b0", "b1", "b2", "b3"], id="no-number"),
    ],
)
def test_weights(weight: float, expected: list[str]) -> None:
    workloads = [
        *(job(f"a{i}", [1]) for i in range(2)),
        *(job(f"b{i}", [1], project="q") for i in range(4)),
    ]

    assert order(workloads, QueueConfig(projects={"q": Share(weight=weight)})) == expected
