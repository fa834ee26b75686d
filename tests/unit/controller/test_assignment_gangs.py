from __future__ import annotations

import dataclasses

import pytest
from tests.unit.controller.assignment_cases import (
    decided,
    given,
    job,
    node,
    nodes,
    pool,
    racks,
    resources,
    waiting,
)

from tinsmith_controller.assignment.types import Node, Stage, Workload
from tinsmith_jobs.spec import Rules

ON_ONE_RACK = Rules(required_level="rack")
ON_FEW_RACKS = Rules(preferred_level="rack")


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        pytest.param({}, [8, 8], ["n0", "n1"], id="one-node-each"),
        pytest.param({}, [8] * 4, ["n0", "n1", "n2", "n3"], id="all-there-is"),
        pytest.param({}, [8] * 5, None, id="all-or-none"),
        pytest.param({"n2": 4}, [4], ["n2"], id="best-fit"),
        pytest.param({"n1": 2, "n2": 6}, [2], ["n2"], id="what-is-used-up"),
        pytest.param({"n2": 1}, [1], ["n2"], id="empty-nodes-stay-empty"),
        pytest.param({"n1": 7, "n2": 7}, [1, 1], ["n1", "n2"], id="gaps-before-empty-nodes"),
        pytest.param({"n3": 4}, [4, 4, 4], ["n0", "n0", "n3"], id="gap-and-one-whole-node"),
        pytest.param({}, [2, 2, 2, 2], ["n0"] * 4, id="together-on-one-node"),
        pytest.param({"n0": 4, "n1": 5}, [8, 4, 3, 1], ["n0", "n1", "n2", "n3"], id="unequal"),
    ],
)
def test_places(held: dict[str, int], wanted: list[int], expected: list[str] | None) -> None:
    others = [job(f"on-{name}", on={name: gpus}) for name, gpus in held.items()]

    found = given(decided([*others, job("a", wanted)], nodes(4)))

    if expected is None:
        assert found == {}
    elif wanted == [8, 4, 3, 1]:
        assert len(found["a"]) == 4
        assert {"n0", "n1"} <= set(found["a"])
    else:
        assert found == {"a": expected}


def test_pods_without_gpus_leave_nodes_with_gpus_alone() -> None:
    decisions = decided([job("a", [0, 0])], [node("gpu"), node("plain", gpus=0)])

    assert given(decisions) == {"a": ["plain", "plain"]}


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        pytest.param(job("a", [8] * 2, rules=ON_ONE_RACK), {"r0"}, id="one"),
        pytest.param(job("a", [8] * 4, rules=ON_ONE_RACK), None, id="too-many"),
        pytest.param(
            job("a", [8], on={"r2n0": 8}, rules=ON_ONE_RACK), {"r2"}, id="where-the-others-are"
        ),
        pytest.param(
            job("a", [8] * 3, on={"r2n0": 8}, rules=ON_ONE_RACK), None, id="no-room-there"
        ),
        pytest.param(
            job("a", [8], on={"r1n0": 8, "r2n0": 8}, rules=ON_ONE_RACK), None, id="apart-already"
        ),
        pytest.param(
            job("a", [8], on={"gone": 8}, rules=ON_ONE_RACK), {"r0"}, id="others-are-nowhere"
        ),
        pytest.param(job("a", [8], rules=Rules(required_level="x")), None, id="unknown-label"),
        pytest.param(job("a", [8] * 3, rules=ON_FEW_RACKS), {"r0"}, id="few-is-one"),
        pytest.param(job("a", [8] * 4, rules=ON_FEW_RACKS), {"r0", "r1"}, id="few-is-two"),
        pytest.param(
            job("a", [8] * 2, on={"r2n0": 8}, rules=ON_FEW_RACKS), {"r2"}, id="few-with-others"
        ),
        pytest.param(job("a", [8], rules=Rules(preferred_level="x")), {"r0"}, id="few-of-none"),
        pytest.param(
            pool("a", [8] * 4, rules=ON_ONE_RACK), {"r0"}, id="as-many-of-a-pool-as-there-is-room"
        ),
    ],
)
def test_levels(workload: Workload, expected: set[str] | None) -> None:
    found = given(decided([workload], racks(3, 3)))

    assert {name[:2] for name in found.get("a", [])} == (expected or set())


def test_tightest_rack_is_taken() -> None:
    others = job("others", on={"r1n0": 8})

    assert given(decided([others, job("a", [8, 8], rules=ON_ONE_RACK)], racks(3, 3))) == {
        "a": ["r1n1", "r1n2"]
    }


def test_pool_gets_as_many_replicas_as_fit() -> None:
    decisions = decided([pool("pool", [8] * 5)], nodes(3))

    assert given(decisions) == {"pool": ["n0", "n1", "n2"]}
    assert waiting(decisions)["pool"] == (
        "needs 1 pod with 8 GPUs; the cluster has room for 0 pods with 8 GPUs "
        "when no other job runs"
    )


@pytest.mark.parametrize(
    ("cluster", "holder"),
    [
        pytest.param(nodes(1), job("h", on={"n0": 8}), id="held"),
        pytest.param(nodes(1), job("h", on={"n0": 8}, stage=Stage.RELEASING), id="leaving"),
        pytest.param(nodes(1), pool("h", on={"n0": 8}), id="pool"),
        pytest.param([node("n0", used=resources(1))], job("h"), id="used-by-others"),
        pytest.param([node("n0", used=resources(99))], job("h"), id="overdrawn"),
    ],
)
def test_what_is_taken_is_not_given(cluster: list[Node], holder: Workload) -> None:
    assert not decided([holder, job("a", [8])], cluster).assign


def test_placement_on_a_node_that_is_gone_takes_nothing() -> None:
    assert given(decided([job("h", on={"gone": 8}), job("a", [8])], nodes(1))) == {"a": ["n0"]}


def test_overdrawn_cpu_does_not_keep_away_who_needs_none() -> None:
    overdrawn = dataclasses.replace(node("n0"), used=resources(0, cpus=500))

    assert given(decided([job("a", [8], amounts={"cpus": 0})], [overdrawn])) == {"a": ["n0"]}
