"""TLS between pods: which connections are let in, and files that change under them."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.pod_keys import POD_KEY

from tinsmith.rpc.channels import open_channel
from tinsmith.rpc.error_codec import decode_rpc_error
from tinsmith.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2, workers_pb2_grpc
from tinsmith_local.certificates import make_certificates
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.auth import ApiKey, Authenticator, Caller
from tinsmith_runtime.rpc.health_probe import is_serving
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_runtime.rpc.pod_tls import PodTls
from tinsmith_runtime.rpc.server import PodServer, ServerConfig

_DEADLINE_S = 10.0


class _Keys:
    """Knows one key of a user."""

    def __init__(self) -> None:
        self.key = ApiKey.generate()

    async def verify(self, key_id: str, secret_sha256: bytes, check: str = "") -> Caller:
        return Caller("p", KeyRole.MEMBER, key_id)


_WorkerBase: Any = workers_pb2_grpc.WorkerServiceServicer
_SchedulerBase: Any = scheduler_pb2_grpc.SchedulerServiceServicer


class _Workers(_WorkerBase):  # type: ignore[misc]
    async def ListWorkers(self, request: object, context: object) -> object:
        return workers_pb2.ListWorkersResponse()


class _Scheduler(_SchedulerBase):  # type: ignore[misc]
    async def ListSessions(self, request: object, context: object) -> object:
        return scheduler_pb2.ListSessionsResponse()


def _tls(folder: Path, role: str = "scheduler") -> PodTls:
    place = folder / role
    return PodTls(place / "tls.crt", place / "tls.key", place / "ca.crt", look_s=0.0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, namespace="jobs")
    return folder


@pytest.fixture
def folder(certificates: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(certificates, tmp_path / "certificates"))


@pytest_asyncio.fixture
async def server(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[PodServer]:
    server = PodServer(
        ServerConfig(
            listen_address="127.0.0.1:0",
            # Its end is waited for, half a second.
            metrics_address=getattr(request, "param", None),
            drain_timeout_s=0.01,
            tls=_tls(folder),
        ),
        domain="scheduler.tinsmith",
        authenticator=Authenticator(_Keys(), roots=(POD_KEY,)),
    )
    server.add(workers_pb2_grpc.add_WorkerServiceServicer_to_server, _Workers())
    server.add(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, _Scheduler())
    await server.start()
    yield server
    await server.stop()


async def _ask(channel: grpc.aio.Channel, credentials: PodCredentials) -> str:
    """Return why a pod's call is refused; empty if it is not."""
    stub = workers_pb2_grpc.WorkerServiceStub(channel)
    request = workers_pb2.ListWorkersRequest()
    try:
        await stub.ListWorkers(request, metadata=credentials.metadata, timeout=_DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return decode_rpc_error(error, address="there").reason
    return ""


def _credentials(folder: Path, role: PodRole, certificate_of: str = "") -> PodCredentials:
    return PodCredentials.read(POD_KEY, role, tls=_tls(folder, certificate_of or role))


async def test_a_pod_with_its_own_certificate_is_let_in(server: PodServer, folder: Path) -> None:
    gateway = _credentials(folder, PodRole.GATEWAY)
    channel = gateway.open_channel(server.address, PodRole.SCHEDULER)
    assert await _ask(channel, gateway) == ""
    await channel.close()


async def test_a_key_over_the_certificate_of_another_role_is_refused(
    server: PodServer, folder: Path
) -> None:
    mixed = _credentials(folder, PodRole.GATEWAY, certificate_of="environment")
    channel = mixed.open_channel(server.address, PodRole.SCHEDULER)
    assert await _ask(channel, mixed) == "KEY_INVALID"
    await channel.close()


async def test_keys_of_users_come_through_gateways_alone(server: PodServer, folder: Path) -> None:
    metadata = (("authorization", f"Bearer {ApiKey.generate()}"),)
    answers = {}
    for role in ("gateway", "trainer"):
        channel = _tls(folder, role).open_channel(server.address, "scheduler")
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = scheduler_pb2.ListSessionsRequest(parent="projects/p")
        try:
            await stub.ListSessions(request, metadata=metadata, timeout=_DEADLINE_S)
            answers[role] = ""
        except grpc.aio.AioRpcError as error:
            answers[role] = decode_rpc_error(error, address="there").reason
        await channel.close()
    assert answers == {"gateway": "", "trainer": "KEY_INVALID"}


async def test_a_server_of_another_role_is_not_talked_to(server: PodServer, folder: Path) -> None:
    gateway = _credentials(folder, PodRole.GATEWAY)
    channel = gateway.open_channel(server.address, PodRole.TRAINER)
    assert await _ask(channel, gateway) != ""
    await channel.close()


@pytest.mark.parametrize("how", ["in clear", "no certificate", "another authority", "expired"])
async def test_strangers_are_not_let_in(
    server: PodServer, folder: Path, tmp_path: Path, how: str
) -> None:
    gateway = PodCredentials.read(POD_KEY, PodRole.GATEWAY)
    authority = (folder / "ca.crt").read_bytes()
    if how == "in clear":
        channel = open_channel(server.address)
    elif how == "no certificate":
        channel = grpc.aio.secure_channel(
            server.address,
            grpc.ssl_channel_credentials(authority),
            options=(("grpc.ssl_target_name_override", "scheduler.tinsmith"),),
        )
    else:
        other = tmp_path / "other"
        long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
        if how == "expired":
            shutil.copytree(folder, other)
            make_certificates(other, days=1, now=long_ago)
        else:
            make_certificates(other)
            (other / "gateway/ca.crt").write_bytes(authority)
        channel = _tls(other, "gateway").open_channel(server.address, "scheduler")
    assert await _ask(channel, gateway) != ""
    await channel.close()


async def test_certificates_that_change_are_used_without_a_lost_call(
    server: PodServer, folder: Path, tmp_path: Path
) -> None:
    gateway = _credentials(folder, PodRole.GATEWAY)
    channel = gateway.open_channel(server.address, PodRole.SCHEDULER)
    refusals: list[str] = []
    is_over = asyncio.Event()

    async def call_all_the_time() -> None:
        while not is_over.is_set():
            refusals.append(await _ask(channel, gateway))

    calling = asyncio.create_task(call_all_the_time())
    old = (folder / "ca.crt").read_bytes()
    # Another authority: first it is trusted as well, then its certificates are shown.
    new = tmp_path / "new"
    make_certificates(new)
    both = old + (new / "ca.crt").read_bytes()
    for role in ("scheduler", "gateway"):
        (folder / role / "ca.crt").write_bytes(both)
    await _ask(channel, gateway)
    for role in ("scheduler", "gateway"):
        for name in ("tls.key", "tls.crt"):
            (folder / role / name).write_bytes((new / role / name).read_bytes())
        await _ask(channel, gateway)
    fresh = _tls(new, "gateway").open_channel(server.address, "scheduler")
    # Trusts the new authority alone, so the server shows what is new.
    assert await _ask(fresh, gateway) == ""
    is_over.set()
    await calling
    assert set(refusals) == {""}
    await fresh.close()
    await channel.close()


async def test_health_checks_need_a_certificate_too(server: PodServer, folder: Path) -> None:
    channel = _tls(folder, "gateway").open_channel(server.address, "scheduler")
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_DEADLINE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await channel.close()


async def test_the_probe_shows_the_pods_own_certificate(server: PodServer, folder: Path) -> None:
    def probe(role: str) -> bool:
        return is_serving(server.address, timeout_s=2.0, tls=_tls(folder), role=role)

    assert await asyncio.to_thread(probe, "scheduler")
    assert not await asyncio.to_thread(probe, "trainer")
    assert not await asyncio.to_thread(is_serving, server.address, timeout_s=2.0)


@pytest.mark.parametrize("server", ["127.0.0.1:0"], indirect=True)
async def test_health_is_told_without_a_certificate_beside_the_metrics(server: PodServer) -> None:
    def ask(path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://{server.metrics_address}{path}") as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    assert await asyncio.to_thread(ask, "/healthz") == (200, b"ok\n")
    assert b"tinsmith_rpc_duration_seconds" in (await asyncio.to_thread(ask, "/metrics"))[1]
    await server.report_unhealthy()
    assert (await asyncio.to_thread(ask, "/healthz"))[0] == 503


def test_files_are_named_all_or_none(folder: Path, tmp_path: Path) -> None:
    assert PodTls.from_settings(None, None, None) is None
    place = folder / "trainer"
    with pytest.raises(ConfigError, match="belong together"):
        PodTls.from_settings(place / "tls.crt", None, place / "ca.crt")
    absent = PodTls.from_settings(place / "tls.crt", place / "tls.key", tmp_path / "none")
    assert absent is not None
    with pytest.raises(ConfigError, match="cannot be read"):
        absent.server_credentials()
    # A key of another certificate is not taken.
    mixed = PodTls(place / "tls.crt", folder / "sampler" / "tls.key", place / "ca.crt")
    with pytest.raises(ConfigError, match="cannot be read"):
        mixed.open_blocking_channel("127.0.0.1:1", "trainer")


def test_an_authority_is_kept_and_not_outlived(folder: Path) -> None:
    before = (folder / "ca.crt").read_bytes()
    issued = make_certificates(folder)
    assert {each.role for each in issued} == set(PodRole)
    assert (folder / "ca.crt").read_bytes() == before
    assert all((each.folder / "tls.key").stat().st_mode & 0o77 == 0 for each in issued)
    with pytest.raises(ConfigError, match="before the certificates would"):
        make_certificates(folder, days=4000)
    (folder / "ca.key").unlink()
    with pytest.raises(ConfigError, match="but not both"):
        make_certificates(folder)
