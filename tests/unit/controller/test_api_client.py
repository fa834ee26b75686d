"""The connection to the API server when the network loses its first calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from tests.fakes.kubernetes_api import FakeKubernetes
from tests.faults.proxy import Fault, FaultProxy

from tinsmith_controller.kube.api_client import ApiError, Cluster


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    server = FakeKubernetes()
    yield server
    server.stop()


@pytest.fixture
def proxy(server: FakeKubernetes) -> Iterator[FaultProxy]:
    """A network between the controller and the server."""
    url = urlsplit(server.start().configuration.host)
    with FaultProxy(str(url.hostname), int(url.port or 0)) as proxy:
        yield proxy


@pytest.fixture
def cluster(proxy: FaultProxy, tmp_path: Path) -> Iterator[Cluster]:
    kubeconfig = tmp_path / "kubeconfig"
    name = "test"
    content = {
        "clusters": [{"name": name, "cluster": {"server": f"http://{proxy.address}"}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "users": [{"name": name, "user": {}}],
        "current-context": name,
    }
    kubeconfig.write_text(yaml.safe_dump(content))
    cluster = Cluster(str(kubeconfig))
    yield cluster
    cluster.close()


def test_a_controller_starts_though_its_first_calls_are_cut(
    cluster: Cluster, proxy: FaultProxy
) -> None:
    proxy.add(Fault(refuse=True, times=2))

    assert cluster.wait_minor_version(60.0) == 31
    assert proxy.num_connections == 3


def test_a_server_that_stays_away_is_told_of_after_the_time_for_it(
    cluster: Cluster, proxy: FaultProxy
) -> None:
    proxy.add(Fault(refuse=True))

    with pytest.raises(ApiError) as failure:
        cluster.wait_minor_version(0.0)
    assert failure.value.is_outcome_unknown


def test_a_server_that_refuses_is_not_asked_again(cluster: Cluster, server: FakeKubernetes) -> None:
    server.refusals = [(403, "forbidden")] * 2

    with pytest.raises(ApiError, match="forbidden"):
        cluster.wait_minor_version(60.0)
    assert len(server.refusals) == 1
