"""The test cluster: one control plane for a session of tests, a namespace for each test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import TestCluster, UnavailableError, prepare, start_cluster


def pytest_runtestloop(session: pytest.Session) -> None:
    """Build the control plane before the first test: that takes longer than a test may."""
    needed = any("cluster" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        with contextlib.suppress(UnavailableError):  # the fixture says so
            prepare()


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
