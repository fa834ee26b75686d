"""One node and one release of the chart for a session; everything of Tinsmith is in containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import ClaimProvisioner, TestCluster
from tests.e2e.cluster.binaries import find_control_plane
from tests.e2e.cluster.control_plane import ControlPlane
from tests.e2e.deployment import Jobs
from tests.e2e.release import DEPLOYMENTS, Release, new_release
from tests.e2e.training import MODEL, TrainingDeployment, provide_models
from tests.fakes.chart_harness import merge
from tests.fakes.postgres import new_server
from tests.fakes.s3_server import CREDENTIALS, S3Server, running_s3_server
from tests.node.container_node import FOLDER, ContainerNode
from tests.node.images import REPOSITORY, TAG
from tests.node.network import ADDRESS, NodeAddresses, NodeServices
from tests.node.programs import find_programs

GPUS = 4
_GATEWAY_PORT = 7077


@pytest.fixture(scope="session")
def isolated() -> Path:
    """The folder of the images; without it these tests would change this machine's network."""
    folder = os.environ.get(FOLDER)
    if not folder:
        pytest.fail("these tests want namespaces of their own: run python -m tests.node")
    return Path(folder)


@pytest.fixture(scope="session")
def cluster(isolated: Path) -> Iterator[TestCluster]:
    """A control plane that pods reach, with DNS and Services."""
    folder = isolated / "cluster"
    with ControlPlane(find_control_plane(), folder / "control-plane", NodeAddresses()) as plane:
        cluster = TestCluster(plane.kubeconfig, folder, plane=plane)
        claims = ClaimProvisioner(cluster.api, folder / "claims")
        claims.start()
        try:
            with NodeServices(cluster.api, find_programs(), folder):
                yield cluster
        finally:
            claims.stop()


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


@pytest.fixture
def namespace(cluster: TestCluster, node: ContainerNode) -> Iterator[str]:
    """A namespace of this test alone."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def store() -> Iterator[S3Server]:
    """S3 beside the node."""
    with running_s3_server(host=ADDRESS) as server:
        server.create_bucket("tinsmith")
        yield server


@pytest.fixture(scope="session")
def release(cluster: TestCluster, node: ContainerNode, store: S3Server) -> Iterator[Release]:
    """The chart, installed by Helm; PostgreSQL is beside the node."""
    database = new_server(host=ADDRESS)
    try:
        with new_release(cluster) as release:
            values: dict[str, Any] = {
                "image": {"repository": REPOSITORY, "tag": TAG},
                # Nothing here issues certificates.
                "tls": {"enabled": False},
                "database": {"url": database.create_database()},
                "storage": {"uri": store.uri("tinsmith"), "env": CREDENTIALS},
                "environment": {"settings": {"num_workers": 1}},
                # Jobs slow their trainers down by a setting that not all authors may use.
                "jobs": {"trustedImages": ["*"]},
                "controller": {
                    "settings": {"device": "cpu", "backoff_base_s": 0.5, "report_interval_s": 0.5}
                },
            }
            # All of them share the two cores of a small machine.
            small = {"resources": {"requests": {"cpu": "20m", "memory": "64Mi"}}}
            values = merge(values, dict.fromkeys((*DEPLOYMENTS, "controller"), small))
            release.install(values)
            for pod in (*DEPLOYMENTS, "controller"):
                release.wait_for_rollout(pod)
            yield release
    finally:
        database.remove()


@pytest.fixture(scope="session")
def model(cluster: TestCluster, release: Release) -> Path:
    """The folder of a model on a volume that jobs know."""
    return provide_models(cluster, release.jobs_namespace) / MODEL


@pytest.fixture(scope="session")
def deployment(
    cluster: TestCluster, release: Release, model: Path, store: S3Server
) -> TrainingDeployment:
    """The release as those who train with it see it."""
    service = release.find("v1", "services", "tinsmith-gateway")
    assert service is not None
    return TrainingDeployment(
        Jobs(cluster, release.jobs_namespace),
        address=f"{service['spec']['clusterIP']}:{_GATEWAY_PORT}",
        api_key=release.secret("tinsmith-keys")["bootstrap-key"],
        store=store,
        models=model.parent,
    )
