from __future__ import annotations

from typing import Any

import pytest
from tests.unit.controller.assignment_cases import decided, given, job, node, waiting

from tinsmith_controller.assignment.node_filters import Obstacle, find_obstacle, tolerates
from tinsmith_controller.assignment.types import Taint
from tinsmith_jobs.spec import Rules, Toleration


@pytest.mark.parametrize(
    ("toleration", "taint", "expected"),
    [
        pytest.param(Toleration("a", value="1"), Taint("a", "1"), True, id="equal"),
        pytest.param(Toleration("a", value="1"), Taint("a", "2"), False, id="other-value"),
        pytest.param(Toleration("b", value="1"), Taint("a", "1"), False, id="other-key"),
        pytest.param(Toleration("a"), Taint("a"), True, id="no-value-at-all"),
        pytest.param(Toleration("a", "", "1"), Taint("a", "1"), True, id="no-operator-is-equal"),
        pytest.param(Toleration("a", "Exists"), Taint("a", "1"), True, id="exists"),
        pytest.param(Toleration("a", "Exists"), Taint("b", "1"), False, id="exists-other-key"),
        pytest.param(Toleration("", "Exists"), Taint("b", "1"), True, id="everything"),
        pytest.param(
            Toleration("", "Exists", effect="NoExecute"), Taint("b"), False, id="one-effect"
        ),
        pytest.param(
            Toleration("a", "Exists", effect="NoSchedule"), Taint("a"), True, id="same-effect"
        ),
        pytest.param(Toleration("a", "Gt", "0"), Taint("a", "1"), False, id="unknown-operator"),
    ],
)
def test_toleration_means_what_kubernetes_means(
    toleration: Toleration, taint: Taint, expected: bool
) -> None:
    assert tolerates(toleration, taint) is expected


@pytest.mark.parametrize(
    ("fields", "rules", "expected"),
    [
        pytest.param({}, {}, None, id="plain"),
        pytest.param({"is_ready": False}, {}, Obstacle.NOT_READY, id="not-ready"),
        pytest.param({"is_cordoned": True}, {}, Obstacle.CORDON, id="cordoned"),
        pytest.param(
            {"is_cordoned": True},
            {"tolerations": (Toleration("", "Exists"),)},
            Obstacle.CORDON,
            id="cordon-is-not-tolerated",
        ),
        pytest.param({"taints": (Taint("a"),)}, {}, Obstacle.TAINT, id="no-schedule"),
        pytest.param(
            {"taints": (Taint("a", effect="NoExecute"),)}, {}, Obstacle.TAINT, id="no-execute"
        ),
        pytest.param(
            {"taints": (Taint("a", effect="PreferNoSchedule"),)}, {}, None, id="prefer-no-schedule"
        ),
        pytest.param(
            {"taints": (Taint("a"), Taint("b"))},
            {"tolerations": (Toleration("a", "Exists"),)},
            Obstacle.TAINT,
            id="one-of-two-tolerated",
        ),
        pytest.param(
            {"taints": (Taint("a"),)},
            {"tolerations": (Toleration("a", "Exists"),)},
            None,
            id="tolerated",
        ),
        pytest.param(
            {"labels": {"zone": "a"}}, {"node_selector": {"zone": "a"}}, None, id="selected"
        ),
        pytest.param(
            {"labels": {"zone": "a"}},
            {"node_selector": {"zone": "b"}},
            Obstacle.SELECTOR,
            id="other-label",
        ),
        pytest.param({}, {"node_selector": {"zone": ""}}, Obstacle.SELECTOR, id="no-label"),
        pytest.param({}, {"gpu_products": ("NVIDIA-H100",)}, Obstacle.PRODUCT, id="other-product"),
        pytest.param(
            {}, {"gpu_products": ("NVIDIA-H100", "NVIDIA-H200")}, None, id="one-of-products"
        ),
        pytest.param({}, {"min_gpu_memory_gib": 141}, None, id="memory"),
        pytest.param({}, {"min_gpu_memory_gib": 142}, Obstacle.GPU_MEMORY, id="too-little-memory"),
        pytest.param(
            {"gpu_memory_gib": 0}, {"min_gpu_memory_gib": 1}, Obstacle.GPU_MEMORY, id="unknown"
        ),
    ],
)
def test_obstacles(
    fields: dict[str, Any], rules: dict[str, Any], expected: Obstacle | None
) -> None:
    assert find_obstacle(node("n", **fields), Rules(**rules), has_gpus=True) is expected


def test_rules_about_gpus_are_not_about_pods_without() -> None:
    rules = Rules(gpu_products=("NVIDIA-H300",), min_gpu_memory_gib=999)

    assert find_obstacle(node("n"), rules, has_gpus=False) is None


@pytest.mark.parametrize(
    ("amounts", "missing"),
    [
        pytest.param({"cpus": 97}, "97 CPU cores", id="cpu"),
        pytest.param({"memory_gib": 1025}, "1025 GiB of memory", id="memory"),
    ],
)
def test_every_resource_has_to_be_there(amounts: dict[str, int], missing: str) -> None:
    decisions = decided([job("a", [1], amounts=amounts)], [node("n")])

    assert not decisions.assign
    assert waiting(decisions)["a"].startswith(f"no node has {missing}")


def test_places_for_pods_run_out() -> None:
    decisions = decided([job("a", [0, 0, 0])], [node("n1", pods=2), node("n2", pods=1)])

    assert given(decisions) == {"a": ["n1", "n1", "n2"]}
    assert not decided([job("a", [0, 0, 0])], [node("n1", pods=2)]).assign
