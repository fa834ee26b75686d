from __future__ import annotations

import pytest
from tests.unit.controller.assignment_cases import decided, job, node, nodes, racks, waiting

from tinsmith_controller.assignment.types import Node, Stage, Taint, Workload
from tinsmith_jobs.spec import Rules


@pytest.mark.parametrize(
    ("workloads", "cluster", "expected"),
    [
        pytest.param([job("a", [8])], [], "the cluster has no nodes", id="no-nodes"),
        pytest.param(
            [job("a", [8] * 4), job("h", on={"n0": 6, "n1": 8})],
            [*nodes(3), node("n3", is_cordoned=True), *(node(f"m{i}") for i in range(2))],
            "needs 4 pods with 8 GPUs each at once; 3 of 6 nodes have 8 free GPUs "
            "(34 GPUs free in all, 8 of them on cordoned nodes)",
            id="not-enough-at-once",
        ),
        pytest.param(
            [job("a", [16])],
            nodes(2),
            "no node has 16 GPUs: the largest has 8",
            id="too-large-a-pod",
        ),
        pytest.param(
            [job("a", [8] * 3)],
            nodes(2),
            "needs 3 pods with 8 GPUs each at once; the cluster has room for 2 pods with 8 GPUs "
            "each when no other job runs",
            id="too-large-for-the-cluster",
        ),
        pytest.param(
            [job("a", [1], rules=Rules(gpu_products=("NVIDIA-H300",)))],
            [*nodes(2), node("b", gpu_product="NVIDIA-B200")],
            "no node has the product NVIDIA-H300; there are NVIDIA-B200 (1 node) and "
            "NVIDIA-H200 (2 nodes)",
            id="product",
        ),
        pytest.param(
            [job("a", [1], rules=Rules(gpu_products=("NVIDIA-H300",)))],
            [node("b", gpu_product="")],
            "no node has the product NVIDIA-H300; none is known",
            id="products-unknown",
        ),
        pytest.param(
            [job("a", [1], rules=Rules(min_gpu_memory_gib=192))],
            nodes(2),
            "no node has GPUs with 192 GiB: the largest have 141 GiB",
            id="gpu-memory",
        ),
        pytest.param(
            [job("a", [8] * 2, rules=Rules(avoided=frozenset({"n0", "gone"})))],
            nodes(2),
            "needs 2 pods with 8 GPUs each at once; the cluster has room for 1 pod with 8 GPUs "
            "when no other job runs; further 8 GPUs on nodes that refused its pods lately",
            id="avoided-one",
        ),
        pytest.param(
            [job("a", [8], rules=Rules(avoided=frozenset({"n0"}))), job("h", on={"n1": 8})],
            nodes(2),
            "needs 1 pod with 8 GPUs; 0 of 2 nodes have 8 free GPUs (8 GPUs free in all, 8 of "
            "them on nodes that refused its pods lately)",
            id="avoided-free",
        ),
        pytest.param(
            [job("a", [8], rules=Rules(avoided=frozenset({"n0", "n1"})))],
            nodes(2),
            "none of the 2 nodes can be used: 2 that refused its pods lately",
            id="avoided-all",
        ),
        pytest.param(
            [job("a", [1], rules=Rules(node_selector={"zone": "a", "disk": "ssd"}))],
            nodes(2),
            "no node that would do has the label disk=ssd and zone=a",
            id="selector",
        ),
        pytest.param(
            [job("a", [1])],
            [
                node("a", is_cordoned=True),
                node("b", is_ready=False),
                node("c", taints=(Taint("x"),)),
                node("d", taints=(Taint("x"),)),
            ],
            "none of the 4 nodes can be used: 1 cordoned, 1 not ready, 2 with taints that it does "
            "not tolerate, tolerations of x would do",
            id="none-usable",
        ),
        pytest.param(
            [
                job("a", [1], amounts={"cpus": 90}),
                job("h", [], on={"n0": 1, "n1": 1}, amounts={"cpus": 9}),
            ],
            nodes(2),
            "needs 1 pod with 1 GPU; 2 of 2 nodes have 1 free GPU, 0 of them with 90 CPU cores and "
            "1 GiB of memory (14 GPUs free in all)",
            id="cpu-is-what-is-missing",
        ),
        pytest.param(
            [job("a", [0], amounts={"cpus": 90}), job("h", on={"n0": 1}, amounts={"cpus": 9})],
            nodes(1),
            "needs 1 pod with 90 CPU cores; 0 of 1 nodes have 90 free CPU cores",
            id="pods-without-gpus",
        ),
        pytest.param(
            [job("a", [8, 8, 8], rules=Rules(required_level="rack"))],
            racks(2, 2),
            "needs 3 pods with 8 GPUs each at once on one value of rack; none of its 2 values has "
            "room for more than 2 pods with 8 GPUs each, even when no other job runs",
            id="level",
        ),
        pytest.param(
            [
                job("a", [8, 8], rules=Rules(required_level="rack")),
                job("h", on={"r0n0": 8, "r1n0": 8}),
            ],
            racks(2, 2),
            "needs 2 pods with 8 GPUs each at once on one value of rack; none of its 2 values has "
            "room for more than 1 pod with 8 GPUs",
            id="level-now",
        ),
        pytest.param(
            [
                job("a", [8], on={"r0n0": 8}, rules=Rules(required_level="rack")),
                job("h", on={"r0n1": 8}),
            ],
            racks(2, 2),
            "needs 1 pod with 8 GPUs on one value of rack, the one that its other pods are on; "
            "it has room for 0 pods with 8 GPUs",
            id="level-of-the-others",
        ),
        pytest.param(
            [job("a", [8], rules=Rules(required_level="rack"))],
            nodes(2),
            "needs 1 pod with 8 GPUs on one value of rack, a label that no node has, even when no "
            "other job runs",
            id="level-that-no-node-has",
        ),
        pytest.param(
            [job("a", [8, 1]), job("h", on={"n0": 1})],
            nodes(1),
            "needs 1 pod with 8 GPUs and 1 pod with 1 GPU at once; they do not fit on the cluster "
            "together even when no other job runs",
            id="unequal-pods",
        ),
        pytest.param(
            [job("a", [8]), *(job(f"h{i}", on={"n0": 1}, stage=Stage.RELEASING) for i in range(5))],
            nodes(1),
            "waits for what is ending: TrainingJob team/h0, TrainingJob team/h1, "
            "TrainingJob team/h2 and 2 more",
            id="many-are-leaving",
        ),
    ],
)
def test_sentences(workloads: list[Workload], cluster: list[Node], expected: str) -> None:
    assert waiting(decided(workloads, cluster))["a"] == expected
