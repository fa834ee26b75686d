"""The front with TLS: every protocol on one port, certificates that are none, slow handshakes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pyqwest
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.fakes.certificates import Certificates, make_certificates
from tests.fakes.gateway_harness import RUN, TIMEOUT_S, GatewayRig, running_gateway
from tests.fakes.held_protocol import HEALTHZ, Protocol, headers, until_closed

from tinsmith_gateway.serving.port_multiplexer import load_tls
from tinsmith_runtime.errors import ConfigError


@pytest_asyncio.fixture
async def rig(tmp_path: Path, protocol: Protocol) -> AsyncIterator[GatewayRig]:
    async with running_gateway(tmp_path, max_head_bytes=4096) as rig:
        yield rig
        protocol.hold.set()


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


@pytest_asyncio.fixture
async def tls_rig(
    tmp_path: Path, protocol: Protocol, certificates: Certificates
) -> AsyncIterator[GatewayRig]:
    async with running_gateway(
        tmp_path, tls_certificate=certificates.certificate, tls_key=certificates.key
    ) as rig:
        yield rig
        protocol.hold.set()


async def test_tls_with_grpc(tls_rig: GatewayRig, certificates: Certificates) -> None:
    address = tls_rig.gateway.address.removeprefix("https://")
    credentials = grpc.ssl_channel_credentials(certificates.ca_file.read_bytes())
    async with grpc.aio.secure_channel(address, credentials) as channel:
        assert (await tls_rig.get_run_status(channel=channel)).run == RUN
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_tls_with_httpx(tls_rig: GatewayRig, certificates: Certificates) -> None:
    context = ssl.create_default_context(cafile=str(certificates.ca_file))
    async with httpx.AsyncClient(base_url=tls_rig.gateway.address, verify=context) as http:
        answer = await http.post("/echo", content=b"a" * 10**6, headers=headers(tls_rig))
        assert (answer.http_version, len(answer.content)) == ("HTTP/1.1", 10**6)


async def test_tls_with_the_client_of_tinker(
    tls_rig: GatewayRig, certificates: Certificates
) -> None:
    """It offers HTTP/2 and HTTP/1.1; only the latter is served to HTTP clients."""
    transport = pyqwest.HTTPTransport(tls_ca_cert=certificates.ca_file.read_bytes())
    client = pyqwest.Client(transport)
    answer = await client.get(f"{tls_rig.gateway.address}/healthz")
    assert (answer.status, bytes(answer.content)) == (200, b'{"status":"ok"}')
    await transport.aclose()


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["h2", "http/1.1"], "http/1.1"),
        (["http/1.1"], "http/1.1"),
        (["h2"], "h2"),
        ([], None),
    ],
)
async def test_tls_prefers_http1(
    tls_rig: GatewayRig, certificates: Certificates, offered: list[str], chosen: str | None
) -> None:
    context = ssl.create_default_context(cafile=str(certificates.ca_file))
    if offered:
        context.set_alpn_protocols(offered)
    host, _, port = tls_rig.gateway.address.removeprefix("https://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == chosen
    if chosen != "h2":
        writer.write(HEALTHZ)
        received = b""
        while not received.endswith(b'{"status":"ok"}'):
            received += await asyncio.wait_for(reader.read(65536), TIMEOUT_S)
    writer.close()


async def test_a_handshake_that_does_not_come_is_dropped(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with running_gateway(
        tmp_path,
        handshake_timeout_s=0.2,
        tls_certificate=certificates.certificate,
        tls_key=certificates.key,
    ) as rig:
        host, _, port = rig.gateway.address.removeprefix("https://").rpartition(":")
        for begin in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begin)
            assert not (await until_closed(reader)).startswith(b"HTTP")
            writer.close()


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    with pytest.raises(ConfigError, match="tls_certificate"):
        load_tls(wrong, wrong)
