"""Callers without a good key: the connections and look-ups that they take from others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tests.fakes.gateway_harness import RUN, GatewayRig, refusal, running_gateway
from tests.fakes.held_protocol import HEALTHZ, Protocol, headers, until_closed
from tests.support.wait import eventually

from tinsmith_gateway.serving.port_multiplexer import PREFACE
from tinsmith_runtime.rpc import key_lookups
from tinsmith_runtime.rpc.auth import ApiKey

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
FEW = 8


@pytest_asyncio.fixture
async def rig(tmp_path: Path, protocol: Protocol) -> AsyncIterator[GatewayRig]:
    async with running_gateway(tmp_path, max_unknown_connections=FEW) as rig:
        yield rig
        protocol.hold.set()


@contextlib.asynccontextmanager
async def opened(
    rig: GatewayRig, host: str, first: bytes, number: int
) -> AsyncIterator[list[Stream]]:
    """Open connections from an address of this machine, which send some bytes and no more."""
    port = int(rig.gateway.address.rpartition(":")[2])
    streams = []
    try:
        for _ in range(number):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
            streams.append((reader, writer))
            writer.write(first)
            await writer.drain()
        yield streams
    finally:
        for _, writer in streams:
            writer.close()


@pytest.mark.parametrize("first", [b"", PREFACE, HEALTHZ], ids=["silent", "http2", "http"])
async def test_half_open_connections_drop_each_other_and_no_known_one(
    rig: GatewayRig, first: bytes
) -> None:
    echo = f"POST /echo HTTP/1.1\r\nhost: x\r\nx-api-key: {rig.key}\r\ncontent-length: 0\r\n\r\n"
    async with opened(rig, "127.0.0.1", echo.encode(), 1) as [(reader, writer)]:
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        rig.pod.hold.clear()
        held = rig.wait_operations()
        await eventually(lambda: rig.pod.requests)
        async with opened(rig, "127.0.0.1", first, 10 * FEW) as strangers:
            # All but the last few were cut.
            for stranger, _ in strangers[: 9 * FEW]:
                await until_closed(stranger)
            writer.write(echo.encode())
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            rig.pod.hold.set()
            assert (await held).revision == 1
            assert (await rig.get_run_status()).run == RUN


async def test_half_open_connections_of_one_address_shut_no_other_out(rig: GatewayRig) -> None:
    async with (
        opened(rig, "127.0.0.2", HEALTHZ[:5], FEW // 2) as quiet,
        opened(rig, "127.0.0.1", b"", 10 * FEW) as loud,
    ):
        for reader, _ in loud[: 9 * FEW]:
            await until_closed(reader)
        for reader, writer in quiet:
            writer.write(HEALTHZ[5:])
            assert b"200 OK" in await reader.readline()


async def test_unknown_keys_of_an_address_are_few_look_ups(rig: GatewayRig) -> None:
    """By HTTP and by gRPC; a key that is known goes on."""
    number = key_lookups.FAILURES_AT_ONCE + 50
    await rig.get_run_status()
    async with httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http:
        answers = [
            await http.post("/echo", headers={"x-api-key": str(ApiKey.generate())})
            for _ in range(number)
        ]
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {401, 429}
        # The bucket may have got some back meanwhile.
        assert codes[: key_lookups.FAILURES_AT_ONCE] == [401] * key_lookups.FAILURES_AT_ONCE
        assert int(answers[-1].headers["retry-after"]) >= 1
        error = await refusal(rig.get_run_status(key=str(ApiKey.generate())))
        assert error.reason in ("RATE_LIMITED", "KEY_INVALID")
        limited = [await refusal(rig.get_run_status(key=str(ApiKey.generate()))) for _ in range(20)]
        assert limited[-1].reason == "RATE_LIMITED"
        assert limited[-1].metadata["what"] == "unknown keys"
        assert (await http.post("/echo", headers=headers(rig))).status_code == 200
    assert (await rig.get_run_status()).run == RUN
