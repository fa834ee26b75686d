from __future__ import annotations

import pytest
from tests.unit.controller.assignment_cases import (
    NOW,
    decided,
    given,
    job,
    key,
    nodes,
    pool,
    victims,
    waiting,
)

from tinsmith_controller.assignment.decide import apply
from tinsmith_controller.assignment.types import QueueConfig, Share, Stage, Workload
from tinsmith_jobs.spec import Rules

QUOTA = QueueConfig(queues={"default": Share(), "q": Share(max_gpus=8)})


@pytest.mark.parametrize(
    ("workloads", "expected"),
    [
        pytest.param([job("v", on={"n0": 8})], {"v"}, id="lower"),
        pytest.param([job("v", on={"n0": 8}, priority=5)], set(), id="equal"),
        pytest.param([job("v", on={"n0": 8}, priority=6)], set(), id="higher"),
        pytest.param([job("v", on={"n0": 8}, is_preemptible=False)], set(), id="not-preemptible"),
        pytest.param([pool("v", on={"n0": 8}, priority=-5)], set(), id="pool"),
        pytest.param([job("v", on={"n0": 8}, stage=Stage.RELEASING)], set(), id="leaving-already"),
        pytest.param([job("v", on={"n0": 8}, ran_s=0)], set(), id="assigned-just-now"),
        pytest.param(
            [job("v", on={"n0": 1}), pool("pool", on={"n0": 1})], set(), id="would-not-fit-then"
        ),
        pytest.param(
            [job("v", on={"n0": 4}), job("w", on={"n0": 4})], {"v", "w"}, id="as-many-as-needed"
        ),
        pytest.param(
            [
                job("v", on={"n0": 8}),
                *(job(f"n1-{i}", on={"n1": 1}, ran_s=60) for i in range(8)),
                job("w", on={"n2": 2}),
            ],
            {"w"},
            id="fewest-gpus",
        ),
        pytest.param(
            [job("v", on={"n0": 8}, priority=1), job("w", on={"n1": 8}, priority=2)],
            {"v"},
            id="lowest-priority",
        ),
        pytest.param(
            [job("v", on={"n0": 8}, ran_s=500), job("w", on={"n1": 8}, ran_s=400)],
            {"w"},
            id="youngest",
        ),
        pytest.param(
            [job("v", on={"n0": 8, "n1": 8, "n2": 8}), job("w", on={"n3": 8}, ran_s=9999)],
            {"w"},
            id="not-a-large-gang-for-one-node",
        ),
    ],
)
def test_victims(workloads: list[Workload], expected: set[str]) -> None:
    held = {binding.node for workload in workloads for binding in workload.placed}

    decisions = decided([*workloads, job("urgent", [8], priority=5)], nodes(len(held)))

    assert victims(decisions) == dict.fromkeys(expected, "urgent")
    assert not decisions.assign


def test_nobody_goes_where_there_is_room() -> None:
    decisions = decided([job("v", on={"n0": 8}), job("urgent", [8], priority=5)], nodes(2))

    assert given(decisions) == {"urgent": ["n1"]}
    assert not decisions.preempt


def test_what_is_leaving_already_counts() -> None:
    workloads = [
        job("v", on={"n0": 8}, stage=Stage.RELEASING, preempted_by=key("urgent")),
        job("w", on={"n1": 8}),
        job("urgent", [8], priority=5),
    ]

    assert not decided(workloads, nodes(2)).preempt


def test_two_do_not_count_on_the_same_room() -> None:
    workloads = [
        job("v", on={"n0": 8}, stage=Stage.RELEASING, preempted_by=key("urgent1")),
        job("w", on={"n1": 8}),
        job("urgent1", [8], priority=5),
        job("urgent2", [8], priority=5),
    ]

    assert victims(decided(workloads, nodes(2))) == {"w": "urgent2"}


def test_only_victims_of_the_same_queue_help_over_a_quota() -> None:
    workloads = [
        job("v", on={"n0": 8}),
        job("w", on={"n1": 8}, queue="q", ran_s=9999),
        job("urgent", [8], queue="q", priority=5),
    ]

    assert victims(decided(workloads, nodes(2), QUOTA)) == {"w": "urgent"}
    assert victims(decided(workloads, nodes(3), QUOTA)) == {"w": "urgent"}
    assert not decided([workloads[0], workloads[2]], nodes(2), QUOTA).preempt


def test_no_victim_for_who_is_over_its_quota_alone() -> None:
    workloads = [job("v", on={"n0": 8}, queue="q"), job("urgent", [8, 8], queue="q", priority=5)]

    assert not decided(workloads, nodes(2), QUOTA).preempt


def test_victims_are_on_the_nodes_that_will_do() -> None:
    rules = Rules(required_level="host")
    workloads = [job("v", on={"n0": 8}), job("urgent", [4, 4], priority=5, rules=rules)]

    assert not decided(workloads, nodes(1)).preempt


def test_preempting_job_starts_when_its_victims_are_gone() -> None:
    workloads = [job("v", on={"n0": 8}), job("urgent", [8], priority=5), job("late", [8])]
    decisions = decided(workloads, nodes(1))
    assert waiting(decisions)["urgent"] == (
        "waits for a lower-priority job to save: TrainingJob team/v"
    )

    saving = apply(workloads, decisions, NOW)
    again = decided(saving, nodes(1))
    gone = [workload for workload in saving if workload.key.name != "v"]

    assert not again.assign
    assert not again.preempt
    assert given(decided(gone, nodes(1))) == {"urgent": ["n0"]}


def test_who_others_leave_for_is_spared_until_it_has_its_place() -> None:
    workloads = [
        job("v", on={"n0": 8}, stage=Stage.RELEASING, preempted_by=key("middle")),
        job("middle", [8], on={"n1": 8}, priority=1),
        job("urgent", [8], priority=5),
    ]

    assert not decided(workloads, nodes(2)).preempt


def test_job_with_a_new_replacement_does_not_give_way_at_the_same_moment() -> None:
    workloads = [job("hurt", [4], on={"n0": 4}), job("urgent", [8], priority=5)]

    decisions = decided(workloads, nodes(1))

    assert given(decisions) == {"hurt": ["n0"]}
    assert not decisions.preempt
