"""What a probe says of a pod, asked as Kubernetes would ask it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import pytest
from tests.support.pod_keys import credentials

from tinsmith_runtime.rpc.scheduler_client import SchedulerClient
from tinsmith_runtime.rpc.server import PodServer, ServerConfig


async def _probe(*arguments: str, listen_address: str = "") -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tinsmith_runtime.rpc.health_probe",
        *arguments,
        env=os.environ | {"TINSMITH_LISTEN_ADDRESS": listen_address},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, errors.decode()


@pytest.fixture
async def server() -> AsyncIterator[PodServer]:
    scheduler = SchedulerClient("127.0.0.1:1", credentials("trainer"))
    server = PodServer(
        ServerConfig(drain_timeout_s=1),
        domain="test.tinsmith",
        authenticator=scheduler.authenticator(),
    )
    yield server
    await server.stop()
    await scheduler.close()


async def test_a_pod_is_healthy_as_long_as_it_serves(server: PodServer) -> None:
    await server.start()
    assert (await _probe(server.address))[0] == 0
    assert (await _probe(listen_address=server.address))[0] == 0
    await server.report_unhealthy()
    assert (await _probe(server.address))[0] == 1


async def test_a_pod_that_stands_by_is_not_healthy(server: PodServer) -> None:
    address = server.bind()
    assert (await _probe(address, "--timeout-s", "0.2"))[0] == 1


async def test_a_probe_without_an_address_says_what_to_do() -> None:
    code, errors = await _probe()
    assert code == 2
    assert "TINSMITH_LISTEN_ADDRESS" in errors
