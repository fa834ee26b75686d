from __future__ import annotations

import pytest
from tests.unit.controller.assignment_cases import (
    decided,
    given,
    job,
    node,
    nodes,
    pool,
    waiting,
)

from tinsmith_controller.assignment.types import Node, QueueConfig, Stage, Workload
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.spec import Rules


@pytest.mark.parametrize(
    ("workloads", "cluster", "expected"),
    [
        pytest.param(
            [job("h", on={"n0": 1}), job("big", [8, 8], waited_s=599), job("late", [8])],
            nodes(2),
            {"late": ["n1"]},
            id="within-its-patience",
        ),
        pytest.param(
            [job("h", on={"n0": 1}), job("big", [8, 8], waited_s=600), job("late", [8])],
            nodes(2),
            {},
            id="after-it",
        ),
        pytest.param(
            [job("h", on={"n0": 1}), job("big", [8, 8], waited_s=600), job("late", [8])],
            nodes(3),
            {"big": ["n1", "n2"]},
            id="it-goes-first",
        ),
        pytest.param(
            [
                job("h0", on={"n0": 1}),
                job("h1", on={"n1": 1}),
                job("h2", on={"n2": 5}),
                job("big", [8, 8], waited_s=600),
                job("late", [3]),
            ],
            nodes(3),
            {"late": ["n2"]},
            id="outside-of-the-most-free",
        ),
        pytest.param(
            [
                job("h0", on={"n0": 1}, ran_s=10),
                job("h1", on={"n1": 5}, ran_s=2000),
                job("big", [8], waited_s=700),
                job("late", [3]),
            ],
            nodes(2),
            {"late": ["n0"]},
            id="where-nobody-came-since",
        ),
        pytest.param(
            [
                job("h0", on={"n0": 4}),
                pool("pool", on={"n1": 1}),
                job("big", [8], waited_s=600),
                job("late", [4]),
            ],
            nodes(2),
            {"late": ["n1"]},
            id="pools-do-not-end",
        ),
        pytest.param(
            [job("h", on={"n0": 6}), job("big", [4], waited_s=600), job("late", [2])],
            nodes(1),
            {},
            id="gpus-of-a-node-are-gathered",
        ),
        pytest.param(
            [
                job("h", on={"n0": 8}),
                job("big", [4, 4], waited_s=600, rules=Rules(node_selector={"a": "b"})),
                job("late", [8]),
            ],
            [node("n0", labels={"a": "b"}), node("n1")],
            {"late": ["n1"]},
            id="nodes-that-it-can-not-use",
        ),
        pytest.param(
            [
                job("h0", on={"n0": 7}),
                job("h1", on={"n1": 1}, project="q"),
                job("big", [8], waited_s=700),
                job("late", [1], project="r", waited_s=9),
            ],
            nodes(2),
            {"late": ["n0"]},
            id="projects-with-less-do-not-take-what-is-kept",
        ),
        pytest.param(
            [
                job("h0", on={"n0": 1}),
                job("big", [8], waited_s=700),
                job("older", [7], project="r", waited_s=701),
            ],
            nodes(1),
            {"older": ["n0"]},
            id="unless-they-waited-longer",
        ),
        pytest.param(
            [job("big", [8] * 3, waited_s=9999), job("late", [8])],
            nodes(2),
            {"late": ["n0"]},
            id="too-large-for-the-cluster-blocks-nobody",
        ),
        pytest.param(
            [
                job("h", on={"n0": 8}, stage=Stage.RELEASING),
                job("big", [8, 8], waited_s=1),
                job("late", [8]),
            ],
            nodes(2),
            {},
            id="somebody-is-leaving-for-it",
        ),
        pytest.param(
            [
                job("h", on={"n0": 1}),
                job("big", [8, 8], waited_s=9999),
                job("urgent", [8], priority=1),
            ],
            nodes(2),
            {"urgent": ["n1"]},
            id="higher-priority-does-not-wait-for-it",
        ),
        pytest.param(
            [
                job("h", on={"n0": 1}),
                job("big", [8, 8], waited_s=800),
                job("big2", [8], waited_s=700),
                job("late", [4]),
            ],
            nodes(3),
            {"big": ["n1", "n2"]},
            id="then-the-next-one-keeps-its-nodes",
        ),
    ],
)
def test_who_goes_ahead(
    workloads: list[Workload], cluster: list[Node], expected: dict[str, list[str]]
) -> None:
    assert given(decided(workloads, cluster)) == expected


def test_who_waits_behind_is_told() -> None:
    workloads = [job("h", on={"n0": 1}), job("big", [8, 8], waited_s=600), job("late", [8])]

    assert waiting(decided(workloads, nodes(2))) == {
        "big": "needs 2 pods with 8 GPUs each at once; 1 of 2 nodes has 8 free GPUs "
        "(15 GPUs free in all)",
        "late": "is behind TrainingJob team/big, which has waited longer",
    }


def test_patience_is_the_operators() -> None:
    workloads = [job("h", on={"n0": 1}), job("big", [8, 8], waited_s=60), job("late", [8])]

    assert not decided(workloads, nodes(2), QueueConfig(backfill_patience_s=60)).assign
    assert decided(workloads, nodes(2), QueueConfig(backfill_patience_s=61)).assign


def test_room_that_is_being_made_is_kept_for_whom_it_is_made() -> None:
    urgent = NamespacedName("TrainingJob", "team", "urgent")
    workloads = [
        job("h", on={"n0": 8}, stage=Stage.RELEASING, preempted_by=urgent),
        job("urgent", [8, 8], priority=5),
        job("late", [8]),
    ]

    decisions = decided(workloads, nodes(2))

    assert not decisions.assign
    assert not decisions.preempt
    assert waiting(decisions) == {
        "urgent": "waits for a lower-priority job to save: TrainingJob team/h",
        "late": "is behind TrainingJob team/urgent, which has a higher priority",
    }
