"""Callers without a good key: the connections and look-ups that they take from others."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tests.fakes.gateway_harness import (
    PROJECT,
    RUN,
    TIMEOUT_S,
    GatewayRig,
    refusal,
    running_gateway,
)
from tests.fakes.held_protocol import HEALTHZ, Protocol, headers, until_closed
from tests.fuzz.frames import frame, literal_headers
from tests.support.metrics import metric
from tests.support.wait import eventually

from tinsmith_gateway.serving import stream_limits
from tinsmith_gateway.serving.splice import PREFACE
from tinsmith_gateway.serving.stream_limits import FrameMeter
from tinsmith_runtime.rpc import key_lookups
from tinsmith_runtime.rpc.auth import ApiKey

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
FEW = 8
AT_ONCE = 20
REFUSED = "tinsmith_gateway_refused_connections_total"
HEADERS, RESET, SETTINGS = 1, 3, 4
HEAD = literal_headers(
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/tinsmith.v1.SchedulerService/GetCapabilities"),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
)


@pytest.fixture
def is_forgotten_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an address may try again would depend on how long a test takes; it is soon too much."""
    defaults = key_lookups.FailureLimit.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "per_s", 1e-6)
    monkeypatch.setitem(defaults, "at_once", AT_ONCE)


@pytest_asyncio.fixture
async def rig(
    tmp_path: Path, protocol: Protocol, is_forgotten_slowly: None
) -> AsyncIterator[GatewayRig]:
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
    number = AT_ONCE + 5
    await rig.get_run_status()
    async with httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http:
        answers = [
            await http.post("/echo", headers={"x-api-key": str(ApiKey.generate())})
            for _ in range(number)
        ]
        codes = [answer.status_code for answer in answers]
        assert codes == [401] * AT_ONCE + [429] * 5
        assert int(answers[-1].headers["retry-after"]) >= 1
        error = await refusal(rig.get_run_status(key=str(ApiKey.generate())))
        assert error.reason == "RATE_LIMITED"
        assert error.metadata["what"] == "unknown keys"
        assert (await http.post("/echo", headers=headers(rig))).status_code == 200
    assert (await rig.get_run_status()).run == RUN


async def test_unknown_keys_of_an_address_keep_no_key_out_that_was_made_here(
    rig: GatewayRig,
) -> None:
    """Not even one that the gateway has not seen before, by HTTP or by gRPC."""
    unseen = [rig.scheduler.new_key(PROJECT) for _ in range(2)]
    async with httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http:
        for _ in range(AT_ONCE + 5):
            strange = str(ApiKey.generate().checked("the root of an attacker"))
            answer = await http.post("/echo", headers={"x-api-key": strange})
        assert answer.status_code == 429  # the address has none left
        assert (await http.post("/echo", headers={"x-api-key": unseen[0]})).status_code == 200
        assert (await rig.get_run_status(key=unseen[1])).run == RUN


def streams(number: int, *, is_reset: bool) -> bytes:
    """Return frames that open the first streams of a connection, and may reset each at once."""
    frames = []
    for index in range(number):
        frames.append(frame(HEADERS, 4, 2 * index + 1, HEAD))
        if is_reset:
            frames.append(frame(RESET, 0, 2 * index + 1, bytes([0, 0, 0, 8])))
    return b"".join(frames)


async def num_refused(reader: asyncio.StreamReader, least: int) -> int:
    """Return how many streams were refused, when there are so many at least."""
    # Each is refused by one frame of headers.
    meter, refused = FrameMeter(), 0
    while refused < least:
        data = await asyncio.wait_for(reader.read(65536), TIMEOUT_S)
        assert data
        refused += meter.feed(data, math.inf, math.inf).num_opened
    return refused


async def test_streams_that_are_reset_at_once_cut_a_strangers_connection(rig: GatewayRig) -> None:
    """And the next ones of its address; calls of others do not wait for what it opened."""
    num_before = metric(REFUSED, reason="too_many_resets")
    begin = PREFACE + frame(SETTINGS, 0, 0, b"")
    for _ in range(3):
        async with opened(rig, "127.0.0.2", begin, 1) as [(reader, writer)]:
            writer.write(streams(10_000, is_reset=True))
            with contextlib.suppress(ConnectionError):
                await until_closed(reader)
        assert (await rig.get_run_status()).run == RUN
    assert metric(REFUSED, reason="too_many_resets") - num_before >= 3


async def test_streams_of_a_stranger_are_passed_on_as_fast_as_they_can_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses none of them, and others' calls do not stand behind them."""
    monkeypatch.setattr(stream_limits, "STRANGERS_STREAMS_AT_ONCE", 50)
    begin = PREFACE + frame(SETTINGS, 0, 0, b"")
    async with (
        running_gateway(tmp_path) as rig,
        opened(rig, "127.0.0.2", begin, 1) as [(reader, writer)],
    ):
        writer.write(streams(80, is_reset=False))
        await writer.drain()
        assert (await rig.get_run_status()).run == RUN
        assert await num_refused(reader, 80) == 80


async def test_frames_without_end_are_passed_on_slowly_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine bytes each, of a kind that means nothing; behind them a call."""
    monkeypatch.setattr(stream_limits, "STRANGERS_FRAMES_AT_ONCE", 100)
    begin = PREFACE + frame(SETTINGS, 0, 0, b"")
    async with (
        running_gateway(tmp_path) as rig,
        opened(rig, "127.0.0.2", begin, 1) as [(reader, writer)],
    ):
        writer.write(frame(0xEE, 0, 0, b"") * 1000 + streams(1, is_reset=False))
        await writer.drain()
        assert (await rig.get_run_status()).run == RUN
        assert await num_refused(reader, 1) == 1
