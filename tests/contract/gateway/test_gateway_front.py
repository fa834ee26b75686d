"""One port for HTTP and gRPC: what the first bytes decide, and what is bounded before them."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shutil
import socket
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio
from tests.fakes.gateway_harness import (
    RUN,
    SAMPLING_SESSION,
    TIMEOUT_S,
    GatewayRig,
    refusal,
    running_gateway,
)
from tests.fakes.held_protocol import HEALTHZ, Protocol, connect, headers, until_closed
from tests.support.memory import num_kept_by_errors, without_collector
from tests.support.wait import TIMEOUT_S as WAIT_S
from tests.support.wait import eventually

from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_gateway.serving.port_multiplexer import bind, raise_file_limit
from tinsmith_gateway.serving.splice import PREFACE
from tinsmith_runtime.errors import ConfigError


@pytest_asyncio.fixture
async def rig(tmp_path: Path, protocol: Protocol) -> AsyncIterator[GatewayRig]:
    async with running_gateway(tmp_path, max_head_bytes=4096) as rig:
        yield rig
        protocol.hold.set()


@pytest_asyncio.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[GatewayRig]:
    """A gateway that ends at once."""
    async with running_gateway(tmp_path, handshake_timeout_s=0.2) as rig:
        yield rig


# Both protocols.


async def test_both_protocols_at_once(rig: GatewayRig) -> None:
    async with httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http:
        answers = await asyncio.gather(
            *(http.get("/healthz") for _ in range(20)),
            *(rig.get_run_status() for _ in range(20)),
            *(http.post("/echo", content=b"a" * 300_000, headers=headers(rig)) for _ in range(5)),
        )
    assert all(answer.json() == {"status": "ok"} for answer in answers[:20])
    assert all(answer.run == RUN for answer in answers[20:40])
    assert all(answer.content == b"a" * 300_000 for answer in answers[40:])


async def test_large_messages_pass_the_splice(rig: GatewayRig) -> None:
    """More than any buffer between the ends, both with a reader that takes its time."""
    image = trajectories_pb2.ImageChunk(data=bytes(40 * 2**20))
    request = sampler_pb2.SampleRequest(
        sampling_session=SAMPLING_SESSION,
        prompt=trajectories_pb2.ModelInput(chunks=[trajectories_pb2.Chunk(image=image)]),
    )
    await rig.call("/tinsmith.v1.SamplerService/Sample", request, None)
    assert rig.pod.requests[0].ByteSize() == request.ByteSize()


async def test_a_refused_message_is_not_kept_until_the_garbage_collector_comes(
    rig: GatewayRig,
) -> None:
    size = 16 * 2**20
    path = "/tinsmith.v1.TrainerService/GetRunStatus"
    with without_collector():
        for _ in range(3):
            call = rig.call(path, b"\x0a\x80\x80\x80\x08" + b"a" * size, None)
            assert (await refusal(call)).reason == "BATCH_TOO_LARGE"
        assert num_kept_by_errors(size) == 0


async def test_the_preface_may_come_byte_by_byte(rig: GatewayRig) -> None:
    reader, writer = await connect(rig)
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for byte in PREFACE:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(settings)
    # The server's first frame is its settings: type 4 on stream 0.
    frame = await asyncio.wait_for(reader.readexactly(9), TIMEOUT_S)
    assert (frame[3], frame[5:9]) == (4, b"\x00\x00\x00\x00")
    writer.close()


async def test_a_method_that_begins_like_the_preface(rig: GatewayRig) -> None:
    reader, writer = await connect(rig)
    writer.write(b"PRI")
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.write(b"VATE / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await until_closed(reader)).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_http_after_http_on_one_connection(rig: GatewayRig) -> None:
    reader, writer = await connect(rig)
    writer.write(HEALTHZ * 3)
    received = b""
    while received.count(b'{"status":"ok"}') < 3:
        received += await asyncio.wait_for(reader.read(65536), TIMEOUT_S)
    writer.close()


async def test_a_half_closed_http_connection_ends(rig: GatewayRig, protocol: Protocol) -> None:
    """A client that closes looks the same: its answer would have no reader."""
    reader, writer = await connect(rig)
    key = rig.key.encode()
    writer.write(b"POST /held HTTP/1.1\r\nhost: x\r\nx-api-key: " + key + b"\r\n\r\n")
    await eventually(lambda: protocol.num_entered >= 1)
    writer.write_eof()
    assert await until_closed(reader) == b""
    writer.close()


async def test_a_half_closed_grpc_connection_ends(rig: GatewayRig) -> None:
    reader, writer = await connect(rig)
    writer.write(PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
    await asyncio.wait_for(reader.readexactly(9), TIMEOUT_S)
    writer.write_eof()
    # The server learns of the end, closes, and so does the front.
    await until_closed(reader)
    writer.close()


# What is bounded.


async def test_garbage_is_refused(rig: GatewayRig) -> None:
    reader, writer = await connect(rig)
    writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    assert (await until_closed(reader)).startswith(b"HTTP/1.1 400")
    writer.close()
    assert (await rig.get_run_status()).run == RUN


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(PREFACE[:5], id="half-a-preface"),
        pytest.param(b"GET /hea", id="half-a-head"),
        pytest.param(b"\r\n", id="an-empty-line"),
    ],
)
async def test_whoever_does_not_say_what_he_wants_is_dropped(
    impatient: GatewayRig, begin: bytes
) -> None:
    reader, writer = await connect(impatient)
    writer.write(begin)
    assert await until_closed(reader) == b""
    writer.close()


async def test_a_slow_second_head_is_dropped(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, handshake_timeout_s=1.0) as rig:
        reader, writer = await connect(rig)
        writer.write(HEALTHZ)
        received = b""
        while not received.endswith(b'{"status":"ok"}'):
            received += await asyncio.wait_for(reader.read(65536), TIMEOUT_S)
        writer.write(b"GET /healthz HTTP/1.1\r\nx: ")
        assert await until_closed(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"a" * 5000 + b"\r\n\r\n", id="at-once"),
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"a" * 5000, id="without-an-end"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n", id="many"),
        pytest.param(b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", id="a-long-path"),
    ],
)
async def test_an_oversized_head_is_refused(rig: GatewayRig, head: bytes) -> None:
    reader, writer = await connect(rig)
    writer.write(head)
    assert (await until_closed(reader)).startswith(b"HTTP/1.1 431")
    writer.close()


async def test_a_large_body_is_no_large_head(rig: GatewayRig) -> None:
    async with httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http:
        for _ in range(3):
            answer = await http.post("/echo", content=b"a" * 100_000, headers=headers(rig))
            assert len(answer.content) == 100_000


async def test_connections_are_bounded(tmp_path: Path, protocol: Protocol) -> None:
    async with running_gateway(tmp_path, max_connections=2) as rig:
        first, second = await connect(rig), await connect(rig)
        reader, writer = await connect(rig)
        assert await until_closed(reader) == b""
        writer.close()
        first[1].close()
        await first[1].wait_closed()
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                reader, writer = await connect(rig)
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                if (await until_closed(reader)).startswith(b"HTTP/1.1 200"):
                    break
                writer.close()
        writer.close()
        second[1].close()


async def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="another process"):
            bind(f"127.0.0.1:{port}")


async def test_accepted_connections_send_at_once() -> None:
    """asyncio sets TCP_NODELAY only on sockets whose protocol is named."""
    with bind("127.0.0.1:0") as bound:
        assert bound.proto == socket.IPPROTO_TCP


def test_the_process_may_open_as_many_files_as_it_needs() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        raise_file_limit(before[0])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
        raise_file_limit(1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_http_requests_have_a_share_of_their_key(tmp_path: Path, protocol: Protocol) -> None:
    async with (
        running_gateway(tmp_path, max_requests_per_project=1, max_tokens_per_project=10) as rig,
        httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http,
    ):
        running = asyncio.create_task(http.post("/held", headers=headers(rig)))
        await eventually(lambda: protocol.num_entered >= 1)
        refused = await http.post("/echo", headers=headers(rig))
        assert (refused.status_code, refused.json()) == (429, {"reason": "RATE_LIMITED"})
        assert int(refused.headers["retry-after"]) >= 1
        waiting = asyncio.create_task(http.post("/wait", headers=headers(rig)))
        other = {"x-api-key": rig.scheduler.new_key("q")}
        another = asyncio.create_task(http.post("/tokens", content=b"11", headers=other))
        await eventually(lambda: protocol.num_entered >= 3)
        protocol.hold.set()
        assert {(await task).status_code for task in (running, waiting, another)} == {200}


# The end.


async def test_a_stream_is_one_request_until_its_end(tmp_path: Path, protocol: Protocol) -> None:
    async with (
        running_gateway(tmp_path, max_requests_per_project=1) as rig,
        httpx.AsyncClient(
            base_url=f"http://{rig.gateway.address}", headers=headers(rig), timeout=TIMEOUT_S
        ) as http,
    ):
        for _ in range(2):
            protocol.hold.clear()
            async with http.stream("POST", "/stream") as answer:
                assert answer.status_code == 200
                events = answer.aiter_text()
                assert await anext(events) == 'data: {"n":1}\n\n'
                assert (await http.post("/echo")).status_code == 429
                protocol.hold.set()
                assert await anext(events) == "data: [DONE]\n\n"
            await eventually(lambda: not rig.gateway._limits.num_projects)


async def test_the_end_finishes_requests_and_cuts_waits(
    rig: GatewayRig, protocol: Protocol
) -> None:
    async with httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http:
        running = asyncio.create_task(http.post("/held", headers=headers(rig)))
        waiting = asyncio.create_task(http.post("/wait", headers=headers(rig)))
        await eventually(lambda: protocol.num_entered >= 2)
        idle, idle_writer = await connect(rig)
        await asyncio.sleep(0)
        stopping = asyncio.create_task(rig.gateway.stop())
        cut = await waiting
        assert (cut.status_code, cut.json()) == (503, {"reason": "DRAINING"})
        assert await until_closed(idle) == b""
        idle_writer.close()
        with pytest.raises(ConnectionRefusedError):
            await connect(rig)
        assert not stopping.done()
        protocol.hold.set()
        assert (await running).status_code == 200
        await stopping


async def test_the_end_does_not_wait_for_ever(tmp_path: Path, protocol: Protocol) -> None:
    async with running_gateway(tmp_path, drain_timeout_s=0.2) as rig:
        rig.pod.hold.clear()
        async with httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http:
            running = asyncio.create_task(http.post("/held", headers=headers(rig)))
            native = asyncio.ensure_future(rig.get_run_status())
            await eventually(lambda: protocol.num_entered >= 1 and rig.pod.requests)
            await asyncio.wait_for(rig.gateway.stop(), TIMEOUT_S)
            cut = await running
            assert (cut.status_code, cut.json()) == (503, {"reason": "DRAINING"})
            with pytest.raises(grpc.aio.AioRpcError):
                await native


async def test_hundreds_of_waits_leave_room(rig: GatewayRig, protocol: Protocol) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://{rig.gateway.address}", limits=limits, timeout=WAIT_S
    ) as http:
        waiting = [
            asyncio.create_task(http.post("/wait", headers=headers(rig))) for _ in range(300)
        ]

        def all_wait() -> bool:
            """Raise what a wait was refused with."""
            ended = [task.result() for task in waiting if task.done()]
            assert not ended
            return protocol.num_entered >= 300

        await eventually(all_wait)
        assert (await http.get("/healthz")).status_code == 200
        assert (await rig.get_run_status()).run == RUN
        protocol.hold.set()
        assert {(await task).status_code for task in waiting} == {200}


# What lies behind the port.


async def test_the_socket_of_the_grpc_server_is_in_the_data_folder(tmp_path: Path) -> None:
    """A cleaner of temporary files would take it from a gateway that runs for long."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # Short, whatever folder the tests have.
    try:
        (folder / "native").mkdir()
        (folder / "native" / "grpc").touch()  # As a gateway leaves it that was killed.
        async with running_gateway(folder) as rig:
            assert (await rig.get_run_status()).run == RUN
            assert stat.S_ISSOCK((folder / "native" / "grpc").stat().st_mode)
            assert stat.S_IMODE((folder / "native").stat().st_mode) == 0o700
        assert not (folder / "native").exists()
    finally:
        shutil.rmtree(folder)


async def test_a_data_folder_that_is_too_deep_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    async with running_gateway(folder) as rig:
        assert (await rig.get_run_status()).run == RUN
        assert not (folder / "native").exists()


# Clients that mean harm, or are gone.


async def test_endless_trailers_are_cut(rig: GatewayRig) -> None:
    """They come after the head and are no body: nothing else bounds them."""
    reader, writer = await connect(rig)
    writer.write(b"POST /healthz HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 2**23:
            writer.write(b"x: " + b"y" * 1021 + b"\r\n")
            sent += 1026
            await asyncio.wait_for(writer.drain(), TIMEOUT_S)
    await until_closed(reader)
    assert sent < 2**23
    writer.close()


async def test_one_endless_trailer_is_cut(rig: GatewayRig) -> None:
    reader, writer = await connect(rig)
    writer.write(b"POST /healthz HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 2**23:
            writer.write(b"y" * 4096)
            sent += 4096
            await asyncio.wait_for(writer.drain(), TIMEOUT_S)
    await until_closed(reader)
    assert sent < 2**23
    writer.close()


async def test_a_body_that_does_not_come_is_given_up(tmp_path: Path, protocol: Protocol) -> None:
    """Its client may be gone without a word, and must not keep its place for ever."""
    async with running_gateway(tmp_path, body_timeout_s=0.2, max_requests_per_project=1) as rig:
        reader, writer = await connect(rig)
        head = (
            f"POST /echo HTTP/1.1\r\nhost: x\r\nx-api-key: {rig.key}\r\ncontent-length: 9\r\n\r\n"
        )
        writer.write(head.encode() + b"half")
        status = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
        assert status.startswith(b"HTTP/1.1 408")
        async with httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http:
            answer = await http.post("/echo", content=b"whole", headers=headers(rig))
        assert answer.content == b"whole"
        writer.close()
