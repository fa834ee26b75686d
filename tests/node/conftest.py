"""One node and one deployment for a session; the control plane is that of `tests/e2e`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import ClaimProvisioner, TestCluster, start_cluster
from tests.e2e.training import TrainingDeployment, training_deployment
from tests.node.container_node import ADDRESS, ContainerNode
from tests.node.images import REPOSITORY, TAG
from tests.node.programs import find_programs

GPUS = 4


@pytest.fixture(scope="session")
def isolated() -> Path:
    """The folder of the images; without it these tests would change this machine's network."""
    folder = os.environ.get("TINSMITH_NODE_FOLDER")
    if not folder:
        pytest.fail("these tests want namespaces of their own: run python -m tests.node")
    return Path(folder)


@pytest.fixture(scope="session")
def cluster(isolated: Path) -> Iterator[TestCluster]:
    """A control plane."""
    with start_cluster(isolated / "cluster") as started:
        yield started


@pytest.fixture(scope="session")
def node(isolated: Path, cluster: TestCluster) -> Iterator[ContainerNode]:
    """The node that pods run on."""
    started = ContainerNode(
        cluster,
        "real",
        find_programs(),
        isolated / "images.tar",
        gpus=GPUS,
        control_group=isolated.name,
    )
    with started:
        yield started


@pytest.fixture(scope="session")
def namespace(cluster: TestCluster, node: ContainerNode) -> Iterator[str]:
    """The namespace of everything."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def deployment(
    isolated: Path, cluster: TestCluster, namespace: str
) -> Iterator[TrainingDeployment]:
    """Services beside the node, which pods reach at its address."""
    folder = isolated / "deployment"
    folder.mkdir()
    claims = ClaimProvisioner(cluster.api, isolated / "claims")
    claims.start()
    try:
        with training_deployment(
            cluster, namespace, folder, host=ADDRESS, image_repository=REPOSITORY, image_tag=TAG
        ) as started:
            yield started
    finally:
        claims.stop()
