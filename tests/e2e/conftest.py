"""The test cluster: one control plane for a session of tests, a namespace for each test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e import evidence
from tests.e2e.cluster import (
    CrdServer,
    Kubelet,
    TestCluster,
    UnavailableError,
    prepare,
    start_cluster,
)
from tests.e2e.cluster.container import why_unusable
from tests.e2e.deployment import install_resources
from tests.e2e.history import recent
from tests.e2e.lab import Lab, start_lab
from tests.e2e.training import TrainingDeployment, process_nodes, training_deployment, two_nodes


def pytest_runtestloop(session: pytest.Session) -> None:
    """Build the control plane before the first test: that takes longer than a test may."""
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if "cluster" in fixtures and not session.config.option.collectonly:
        with contextlib.suppress(UnavailableError):  # the fixture says so
            prepare(with_crd_server="crd_server" in fixtures)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Histories of the test before are not those of this one."""
    recent.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what a failed test says of itself in logs and histories."""
    report = yield
    if report.failed and call.when == "call":
        used = getattr(item, "funcargs", {})
        folders = [value for value in used.values() if isinstance(value, Path)]
        folders += [value.folder for value in used.values() if isinstance(value, Lab)]
        told = evidence.keep(item.name, folders, recent, root=evidence.ROOT)
        report.sections.append(("evidence", told))
    return report


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A Kubernetes API; a machine that can have none skips, but for CI, where it must be there."""
    try:
        with start_cluster(tmp_path_factory.mktemp("cluster")) as started:
            yield started
    except UnavailableError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def crd_server(cluster: TestCluster) -> Iterator[CrdServer]:
    """A server behind the cluster's that evaluates CEL rules; optional, in CI too."""
    try:
        with cluster.crd_server() as started:
            yield started
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def process_pods() -> None:
    """Skips where pods cannot be processes; CI must be able to."""
    if reason := why_unusable():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def namespace(cluster: TestCluster) -> Iterator[str]:
    """A namespace of this test alone."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def resources(cluster: TestCluster) -> TestCluster:
    """The cluster with the definitions of our resources."""
    install_resources(cluster)
    return cluster


@pytest.fixture(scope="module")
def lab(resources: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A controller for all tests of a module, in a namespace of theirs."""
    folder = tmp_path_factory.mktemp("lab")
    with resources.namespace() as name, start_lab(resources, name, folder) as lab:
        yield lab


@pytest.fixture(scope="module")
def kubelet(request: pytest.FixtureRequest, cluster: TestCluster) -> Iterator[Kubelet]:
    """Two nodes of two GPUs, whose names begin as the module says: `NODES`."""
    with process_nodes(cluster, two_nodes(request.module.NODES)) as started:
        yield started


@pytest.fixture(scope="module")
def deployment(
    cluster: TestCluster, kubelet: Kubelet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainingDeployment]:
    """A deployment for all tests of a module: jobs do not disturb each other."""
    with (
        cluster.namespace() as namespace,
        training_deployment(cluster, namespace, tmp_path_factory.mktemp("jobs")) as started,
    ):
        yield started
