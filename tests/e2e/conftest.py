"""The test cluster: one control plane for a session of tests, a namespace for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import TestCluster, UnavailableError, start_cluster


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


@pytest.fixture
def namespace(cluster: TestCluster) -> Iterator[str]:
    """A namespace of this test alone."""
    with cluster.namespace() as name:
        yield name
