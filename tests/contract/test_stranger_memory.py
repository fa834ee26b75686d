"""The memory of processes to which large requests are sent, as the kernel counts it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.fakes.scheduler import bearer
from tests.integration.servers import PodProcess
from tests.support.memory import peak_mib
from tests.support.pod_keys import POD_KEY
from tests.support.wait import until

from tinsmith_local.process import free_port
from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_runtime.rpc.health_probe import is_serving

KEY = str(ApiKey.generate())
NUM_CALLS, BODY_BYTES, BOMB_BYTES = 8, 60 * 2**20, 200 * 2**20
ALLOWED_GROWTH_MIB = 200
"""Eight bodies that were taken are 480 MiB, and two bombs that went off 400."""
TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, PodProcess]]]:
    """A scheduler and a gateway, each with its address."""
    folder = tmp_path_factory.mktemp("pods")
    addresses = {pod: f"127.0.0.1:{free_port()}" for pod in ("scheduler", "gateway")}
    with contextlib.ExitStack() as stack:
        found = {}
        for pod, address in addresses.items():
            settings = {
                "POD_KEY": POD_KEY,
                "DATA_DIR": str(folder / pod),
                "LISTEN_ADDRESS": address,
                "SCHEDULER_ADDRESS": addresses["scheduler"],
                "DRAIN_TIMEOUT_S": "1",
            }
            if pod == "scheduler":
                settings["BOOTSTRAP_KEY"] = KEY
            process = stack.enter_context(PodProcess(pod, folder, settings))
            found[pod] = address, process
        for address in addresses.values():
            until(lambda at=address: is_serving(at, timeout_s=1.0))  # type: ignore[misc]
        yield found


@pytest.mark.parametrize("pod", ["scheduler", "gateway"])
@pytest.mark.parametrize(
    ("path", "codes"),
    [
        ("/tinsmith.v1.SchedulerService/CreateSession", {"UNAUTHENTICATED"}),
        ("/tinsmith.v1.Unknown/Method", {"UNIMPLEMENTED"}),
        ("/grpc.health.v1.Health/Check", {"OK"}),
    ],
)
async def test_bodies_without_a_key_take_no_memory(
    pods: dict[str, tuple[str, PodProcess]], pod: str, path: str, codes: set[str]
) -> None:
    address, process = pods[pod]
    before = peak_mib(process.pid)
    body = bytes(BODY_BYTES)
    assert await _send(address, path, [body] * NUM_CALLS, ()) == codes
    assert peak_mib(process.pid) - before < ALLOWED_GROWTH_MIB


@pytest.mark.parametrize("pod", ["scheduler", "gateway"])
async def test_bombs_with_a_key_are_not_unpacked(
    pods: dict[str, tuple[str, PodProcess]], pod: str
) -> None:
    address, process = pods[pod]
    before = peak_mib(process.pid)
    codes = await _send(
        address,
        "/tinsmith.v1.SchedulerService/CreateSession",
        [bytes(BOMB_BYTES)] * 2,
        bearer(KEY),
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
