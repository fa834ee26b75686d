"""The start of a controller whose API server does not answer its first calls."""

from __future__ import annotations

import asyncio
import http.client
import itertools
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from tests.fakes.kubernetes_api import FakeKubernetes
from tests.faults.proxy import Fault, FaultProxy
from tests.support.wait import TIMEOUT_S, eventually
from tests.unit.controller.controller_settings import REQUIRED

from tinsmith_controller.config import ControllerConfig
from tinsmith_controller.health import HealthServer
from tinsmith_controller.pod import open_pod
from tinsmith_local.process import free_port
from tinsmith_runtime.errors import ConfigError

PATHS = ("/healthz", "/readyz", "/else")


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
    return ControllerConfig(**REQUIRED, kubeconfig=str(kubeconfig))


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

    seconds = itertools.count(0.0, 20.0)
    stopped = asyncio.get_running_loop().create_future()
    with pytest.raises(ConfigError, match="does not answer"):
        await open_pod(config, stopped, on_lost=unexpected, clock=lambda: next(seconds))
    # At 20 s, at 40 s, and no more behind the 60 s of `sync_timeout_s`.
    assert proxy.num_connections == 3


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


def test_a_controller_that_waits_is_alive_and_not_ready() -> None:
    address, is_open = f"127.0.0.1:{free_port()}", False
    health = HealthServer(address, is_alive=lambda: True, is_ready=lambda: is_open)
    health.start()
    try:
        good, bad, unknown = (200, b"ok\n"), (503, b"not ok\n"), (404, b"not ok\n")
        assert [answer(address, path) for path in PATHS] == [good, bad, unknown]
        is_open = True
        assert [answer(address, path) for path in PATHS] == [good, good, unknown]
    finally:
        health.stop()


def answer(address: str, path: str) -> tuple[int, bytes]:
    """Return the status and the body."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    connection.request("GET", path)
    found = connection.getresponse()
    content = found.read()
    connection.close()
    return found.status, content
