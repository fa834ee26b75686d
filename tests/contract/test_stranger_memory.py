"""The memory of processes to which large requests are sent, as the kernel counts it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.fakes.scheduler import bearer
from tests.support.memory import peak_mib
from tests.support.pods import PodDeployment

PODS = ("scheduler", "gateway")
NUM_CALLS, BODY_BYTES, BOMB_BYTES = 8, 60 * 2**20, 200 * 2**20
ALLOWED_GROWTH_MIB = 200
"""Eight bodies that were taken are 480 MiB, and two bombs that went off 400."""
TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodDeployment]:
    settings = {pod: {"drain_timeout_s": 1} for pod in PODS}
    with PodDeployment(tmp_path_factory.mktemp("pods"), {}, PODS, settings=settings) as running:
        yield running


@pytest.mark.parametrize("pod", PODS)
@pytest.mark.parametrize(
    ("path", "codes"),
    [
        ("/tinsmith.v1.SchedulerService/CreateSession", {"UNAUTHENTICATED"}),
        ("/tinsmith.v1.Unknown/Method", {"UNIMPLEMENTED"}),
        ("/grpc.health.v1.Health/Check", {"OK"}),
    ],
)
async def test_bodies_without_a_key_take_no_memory(
    running: PodDeployment, pod: str, path: str, codes: set[str]
) -> None:
    process = running.processes[pod]
    before = peak_mib(process.pid)
    body = bytes(BODY_BYTES)
    assert await _send(process.address, path, [body] * NUM_CALLS, ()) == codes
    assert peak_mib(process.pid) - before < ALLOWED_GROWTH_MIB


@pytest.mark.parametrize("pod", PODS)
async def test_bombs_with_a_key_are_not_unpacked(running: PodDeployment, pod: str) -> None:
    process = running.processes[pod]
    before = peak_mib(process.pid)
    codes = await _send(
        process.address,
        "/tinsmith.v1.SchedulerService/CreateSession",
        [bytes(BOMB_BYTES)] * 2,
        bearer(running.api_key),
        compression=grpc.Compression.Gzip,
    )
    assert codes == {"RESOURCE_EXHAUSTED"}
    assert peak_mib(process.pid) - before < ALLOWED_GROWTH_MIB


async def _send(
    address: str, path: str, bodies: list[bytes], metadata: Any, **options: Any
) -> set[str]:
    """Send bodies at once; return the codes of the answers."""
    unbounded = [("grpc.max_send_message_length", -1)]

    async def send(channel: grpc.aio.Channel, body: bytes) -> str:
        call: Any = channel.unary_unary(path)
        try:
            await call(body, metadata=metadata, timeout=TIMEOUT_S, **options)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async with grpc.aio.insecure_channel(address, options=unbounded) as channel:
        return set(await asyncio.gather(*(send(channel, body) for body in bodies)))
