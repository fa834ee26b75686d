from __future__ import annotations

import pytest
from tests.unit.controller.assignment_cases import decided, given, job, nodes, pool, waiting

from tinsmith_controller.assignment.types import QueueConfig, Share, Stage, Workload

RESEARCH = QueueConfig(queues={"default": Share(), "research": Share(max_gpus=8)})
PROJECT = QueueConfig(projects={"p": Share(max_gpus=8)})


@pytest.mark.parametrize(
    ("policy", "workloads", "expected", "sentence"),
    [
        pytest.param(
            RESEARCH,
            [job("a", [8], queue="foo")],
            {},
            "queue foo does not exist; there are default and research",
            id="unknown-queue",
        ),
        pytest.param(QueueConfig(), [job("a", [8], queue="foo")], {"a"}, "", id="no-queues"),
        pytest.param(RESEARCH, [job("a", [8], queue="research")], {"a"}, "", id="all-of-it"),
        pytest.param(
            RESEARCH,
            [job("a", [8], queue="research"), job("h", on={"n0": 4}, queue="research")],
            {},
            "queue research holds 4 of its 8 GPUs, and the job needs 8",
            id="too-much-together",
        ),
        pytest.param(
            RESEARCH,
            [
                job("a", [8], queue="research"),
                job("h", on={"n0": 4}, queue="research", stage=Stage.RELEASING),
            ],
            {},
            "waits for what is ending: TrainingJob team/h",
            id="leaving-still-holds",
        ),
        pytest.param(
            RESEARCH,
            [job("a", [8, 8], queue="research")],
            {},
            "queue research may hold 8 GPUs, and the job needs 16",
            id="too-much-alone",
        ),
        pytest.param(
            PROJECT,
            [job("a", [8]), job("h", on={"n0": 1})],
            {},
            "project p holds 1 of its 8 GPUs, and the job needs 8",
            id="project",
        ),
        pytest.param(
            PROJECT, [job("a", [8]), job("h", on={"n0": 1}, project="q")], {"a"}, "", id="others"
        ),
        pytest.param(
            PROJECT, [job("a", [4], on={"n0": 4})], {"a"}, "", id="replacement-within-quota"
        ),
        pytest.param(
            PROJECT, [job("a", [0]), job("h", on={"n0": 9})], {"a"}, "", id="no-gpus-no-quota"
        ),
    ],
)
def test_quotas(
    policy: QueueConfig, workloads: list[Workload], expected: set[str], sentence: str
) -> None:
    decisions = decided(workloads, nodes(4), policy)

    assert set(given(decisions)) == set(expected)
    assert waiting(decisions).get("a", "") == sentence


def test_pool_gets_replicas_up_to_the_quota() -> None:
    decisions = decided([pool("a", [4] * 3, queue="research")], nodes(4), RESEARCH)

    assert len(given(decisions)["a"]) == 2
    assert waiting(decisions)["a"] == "queue research holds 8 of its 8 GPUs, and the pool needs 4"


@pytest.mark.parametrize(
    ("waited_s", "expected"),
    [
        pytest.param(599, {"late"}, id="others-go-ahead-while-it-is-patient"),
        pytest.param(600, set(), id="and-not-after"),
    ],
)
def test_quota_is_kept_for_who_waited_too_long(waited_s: float, expected: set[str]) -> None:
    workloads = [
        job("h", on={"n0": 4}, queue="research"),
        job("big", [8], queue="research", waited_s=waited_s),
        job("late", [4], queue="research"),
    ]

    decisions = decided(workloads, nodes(4), RESEARCH)

    assert set(given(decisions)) == expected
    if not expected:
        assert waiting(decisions)["late"] == (
            "queue research holds 4 of its 8 GPUs, and keeps the others for TrainingJob team/big, "
            "which has waited longer"
        )
