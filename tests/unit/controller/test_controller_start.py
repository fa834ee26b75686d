"""The start of a controller whose API server does not answer its first calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from tests.fakes.kubernetes_api import FakeKubernetes
from tests.faults.proxy import Fault, FaultProxy
from tests.support.wait import eventually

from tinsmith_controller.config import ControllerConfig
from tinsmith_controller.pod import open_pod
from tinsmith_runtime.errors import ConfigError


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
def config(proxy: FaultProxy, tmp_path: Path) -> ControllerConfig:
    kubeconfig = tmp_path / "kubeconfig"
    name = "test"
    content = {
        "clusters": [{"name": name, "cluster": {"server": f"http://{proxy.address}"}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "users": [{"name": name, "user": {}}],
        "current-context": name,
    }
    kubeconfig.write_text(yaml.safe_dump(content))
    return ControllerConfig(
        namespaces="team-a",
        scheduler_address="scheduler:7070",
        gateway_address="gateway:7077",
        pod_key="k",
        storage_uri="s3://bucket",
        image_repository="tinsmith",
        image_tag="1",
        lease_namespace="tinsmith",
        kubeconfig=str(kubeconfig),
    )


async def opened(config: ControllerConfig) -> bool:
    """Whether a replica was opened, which is stopped again."""
    pod = await open_pod(config, asyncio.get_running_loop().create_future(), on_lost=unexpected)
    if pod is not None:
        await asyncio.to_thread(pod.stop)
    return pod is not None


def unexpected() -> None:
    raise AssertionError("no other replica took over")


async def test_a_controller_starts_though_its_first_calls_are_cut(
    config: ControllerConfig, proxy: FaultProxy
) -> None:
    proxy.add(Fault(refuse=True, times=2))

    assert await opened(config)
    assert proxy.num_connections == 3


async def test_a_server_that_has_too_much_to_do_is_asked_again(
    config: ControllerConfig, server: FakeKubernetes
) -> None:
    server.refusals = [(429, "later")]

    assert await opened(config)
    assert not server.refusals


async def test_a_server_that_stays_away_ends_the_start(
    config: ControllerConfig, proxy: FaultProxy
) -> None:
    proxy.add(Fault(refuse=True))

    with pytest.raises(ConfigError, match="does not answer"):
        await opened(dataclasses.replace(config, sync_timeout_s=0.5))
    assert proxy.num_connections > 1


async def test_a_server_that_refuses_is_not_asked_again(
    config: ControllerConfig, server: FakeKubernetes
) -> None:
    server.refusals = [(403, "forbidden")] * 2

    with pytest.raises(ConfigError, match="forbidden"):
        await opened(config)
    assert len(server.refusals) == 1


async def test_a_stop_ends_the_wait_for_a_server(
    config: ControllerConfig, proxy: FaultProxy
) -> None:
    proxy.add(Fault(refuse=True))
    stopped = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(open_pod(config, stopped, on_lost=unexpected))
    await eventually(lambda: proxy.num_connections > 0)
    stopped.set_result(None)

    assert await waiting is None
