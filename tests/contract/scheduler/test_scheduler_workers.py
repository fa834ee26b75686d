from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.fakes.postgres import PostgresServer
from tests.fakes.postgres_proxy import PostgresProxy
from tests.fakes.scheduler_fake_trainer import (
    BASE_MODEL,
    Rig,
    expect_rpc_error,
    running_rig,
)
from tests.support.pod_keys import pod
from tests.support.pods import PodProcess
from tests.support.wait import eventually

from tinsmith.v1 import keys_pb2, scheduler_pb2, workers_pb2
from tinsmith_runtime.errors import ConfigError
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.pod import SchedulerPod

Code = grpc.StatusCode
Worker = workers_pb2.Worker


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        yield rig


async def capabilities(rig: Rig) -> scheduler_pb2.Capabilities:
    request = scheduler_pb2.GetCapabilitiesRequest(parent="projects/default")
    answer: scheduler_pb2.Capabilities = await rig.stub.GetCapabilities(
        request, metadata=rig.admin, timeout=5
    )
    return answer


async def test_capabilities_follow_the_workers(rig: Rig) -> None:
    assert not (await capabilities(rig)).models
    listed = await rig.register(max_runs=3)
    assert listed.heartbeat_interval.seconds == 3
    await rig.register_sampler()
    await rig.register(Worker.ROLE_ENVIRONMENT, name="env-0", address="e:1")
    await rig.register(Worker.ROLE_COORDINATOR, name="coordinator-0", address="c:1")
    await rig.create_run(rig.admin, await rig.session(rig.admin))
    answer = await capabilities(rig)
    (model,) = answer.models
    assert (model.model.base_model, model.model.vocabulary_size) == (BASE_MODEL, 256)
    assert (model.trainable, model.sampleable, model.num_runs, model.max_runs) == (True, True, 1, 3)
    assert (answer.environment_address, answer.coordinator_address) == ("e:1", "c:1")
    await rig.advance(20, keep=("sampler-0",))
    answer = await capabilities(rig)
    (model,) = answer.models
    assert (model.trainable, model.sampleable, model.max_runs) == (False, True, 0)
    assert answer.coordinator_address == ""


async def test_pods_list_the_workers_that_are_alive(rig: Rig) -> None:
    for role, name in (
        (Worker.ROLE_SAMPLER, "sampler-1"),
        (Worker.ROLE_COORDINATOR, "coordinator-0"),
        (Worker.ROLE_SAMPLER, "sampler-0"),
    ):
        await rig.register(role, name=name, address="a:1")

    async def listed(role: int = 0) -> list[str]:
        request = workers_pb2.ListWorkersRequest(role=role)  # type: ignore[arg-type]
        answer = await rig.worker_stub.ListWorkers(request, metadata=pod("gateway"))
        assert all(worker.models[0].base_model == BASE_MODEL for worker in answer.workers)
        return [worker.name for worker in answer.workers]

    assert await listed() == [
        "workers/coordinator-0",
        "workers/sampler-0",
        "workers/sampler-1",
    ]
    assert await listed(Worker.ROLE_COORDINATOR) == ["workers/coordinator-0"]
    request = workers_pb2.ListWorkersRequest(page_size=2)
    first = await rig.worker_stub.ListWorkers(request, metadata=pod("gateway"))
    assert [worker.name for worker in first.workers] == [
        "workers/coordinator-0",
        "workers/sampler-0",
    ]
    request.page_token = first.next_page_token
    last = await rig.worker_stub.ListWorkers(request, metadata=pod("gateway"))
    assert [worker.name for worker in last.workers] == ["workers/sampler-1"]
    assert not last.next_page_token
    request.role = Worker.ROLE_SAMPLER
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.worker_stub.ListWorkers(request, metadata=pod("gateway"))
    await rig.advance(20, keep=("sampler-1",))
    assert await listed() == ["workers/sampler-1"]
    assert await listed(Worker.ROLE_TRAINER) == []
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await listed(77)


async def test_unknown_worker_has_to_register_again(rig: Rig) -> None:
    await rig.register()
    await rig.restart()
    with expect_rpc_error(Code.NOT_FOUND, reason="RESOURCE_NOT_FOUND"):
        await rig.advance(1)


@pytest.mark.parametrize(
    "worker",
    [
        Worker(name="workers/a", address="a:1"),
        Worker(name="workers/a", role=Worker.ROLE_SAMPLER),
        Worker(name="a", role=Worker.ROLE_SAMPLER, address="a:1"),
        Worker(name="workers/a", role=Worker.ROLE_TRAINER, address="a:1"),
    ],
    ids=["no-role", "no-address", "bad-name", "no-room"],
)
async def test_invalid_workers(rig: Rig, worker: workers_pb2.Worker) -> None:
    request = workers_pb2.RegisterWorkerRequest(worker=worker)
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.worker_stub.RegisterWorker(request, metadata=pod("trainer"))


async def test_only_pods_are_workers(rig: Rig) -> None:
    register = workers_pb2.RegisterWorkerRequest()
    heartbeat = workers_pb2.HeartbeatWorkerRequest(name="workers/a")
    for method, request in (
        (rig.worker_stub.RegisterWorker, register),
        (rig.worker_stub.HeartbeatWorker, heartbeat),
        (rig.worker_stub.ListWorkers, workers_pb2.ListWorkersRequest()),
    ):
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
            await method(request, metadata=rig.admin)


async def test_tokenizer(rig: Rig) -> None:
    request = scheduler_pb2.GetTokenizerRequest(base_model=BASE_MODEL)
    with expect_rpc_error(Code.NOT_FOUND, reason="MODEL_NOT_FOUND"):
        await rig.stub.GetTokenizer(request, metadata=rig.admin)
    await rig.register(files={"tokenizer.json": b"{}"})
    tokenizer = await rig.stub.GetTokenizer(request, metadata=rig.admin)
    assert (tokenizer.digest, dict(tokenizer.files)) == ("d1", {"tokenizer.json": b"{}"})
    request.known_digest = "d1"
    tokenizer = await rig.stub.GetTokenizer(request, metadata=rig.admin)
    assert (tokenizer.digest, dict(tokenizer.files)) == ("d1", {})
    await rig.restart()
    with expect_rpc_error(Code.UNAVAILABLE, reason="WORKER_UNAVAILABLE"):
        await rig.stub.GetTokenizer(request, metadata=rig.admin)


METHODS = [
    f"{service.full_name}/{method.name}"
    for file in (scheduler_pb2, keys_pb2, workers_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
TAKE_NOTHING = ("GetCallerKey", "ListWorkers")


@pytest.mark.parametrize("method", METHODS)
async def test_malformed_and_empty_requests_are_typed(rig: Rig, method: str) -> None:
    call: Any = rig.channel.unary_unary(f"/{method}", request_serializer=bytes)
    credential = rig.admin
    if "Worker" in method or method.endswith("VerifyKey"):
        credential = pod("gateway" if method.endswith("ListWorkers") else "trainer")
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="MALFORMED_REQUEST"):
        await call(b"\xff\xff\xff", metadata=credential)
    if method.endswith(TAKE_NOTHING):
        return
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await call(b"", metadata=credential)


async def test_long_names_fit_into_errors(rig: Rig) -> None:
    name = "projects/default/trainingRuns/" + "x" * 1_000_000
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.get_run(rig.admin, name)


async def test_one_scheduler_for_each_folder(tmp_path: Path) -> None:
    first, second = (SchedulerPod(SchedulerConfig(data_dir=tmp_path)) for _ in range(2))
    await first.start()
    with pytest.raises(ConfigError, match="in use"):
        await second.start()
    await second.stop()
    await first.stop()


async def test_a_second_scheduler_of_a_database_stands_by(
    tmp_path: Path, postgres: PostgresServer, postgres_url: str
) -> None:
    config = SchedulerConfig(data_dir=tmp_path, database_url=postgres_url)
    first, second, third = (SchedulerPod(config) for _ in range(3))
    await first.start()
    start = asyncio.create_task(second.start())
    given_up = asyncio.create_task(third.start())
    await asyncio.to_thread(
        postgres.wait_for,
        "SELECT count(*) = 2 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        database=postgres_url.rpartition("/")[2],
    )
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert not start.done()
    await first.stop()
    await start
    assert second.address
    await second.stop()
    await third.stop()
    assert "password" not in repr(config)


def scheduler_process(data_dir: Path, **settings: object) -> PodProcess:
    """Return a scheduler that is not started yet; its log is beside its data."""
    return PodProcess("scheduler", data_dir, {"data_dir": data_dir, **settings})


async def says(process: PodProcess, text: str) -> None:
    await eventually(lambda: text in process.log.read_text() or process.check_running())


async def test_a_scheduler_that_was_replaced_ends(tmp_path: Path, postgres_url: str) -> None:
    successor = SchedulerPod(SchedulerConfig(data_dir=tmp_path, database_url=postgres_url))
    async with PostgresProxy(postgres_url) as proxy:
        with scheduler_process(tmp_path, database_url=proxy.url) as process:
            await says(process, '"event": "serving"')
            await proxy.close()
            await successor.start()
            await proxy.open()
            assert await asyncio.to_thread(process.wait) == 3
    log = process.log.read_text()
    assert "another scheduler took over" in log
    assert "password" not in log
    await successor.stop()


async def test_a_scheduler_that_stands_by_ends_at_sigterm(
    tmp_path: Path, postgres_url: str
) -> None:
    active = SchedulerPod(SchedulerConfig(data_dir=tmp_path, database_url=postgres_url))
    await active.start()
    with scheduler_process(tmp_path, database_url=postgres_url) as process:
        await says(process, "waiting: another process holds the database")
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0
    await active.stop()


async def test_process_serves_until_sigterm(tmp_path: Path) -> None:
    settings = {"pod_key": "secret-of-pods", "metrics_address": "127.0.0.1:0"}
    with scheduler_process(tmp_path, **settings) as process:
        await says(process, '"event": "serving"')
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0
    log = process.log.read_text()
    assert '"event": "stopped"' in log
    assert "secret-of-pods" not in log
