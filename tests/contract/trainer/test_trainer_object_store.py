"""A trainer on an S3 store: what needs the store waits for it or is refused, the rest goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.fakes.s3_server import CREDENTIALS, S3Server, running_s3_server
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    code_of,
    error_of,
    logprobs_of,
    make_datum,
    new_id,
    refusal,
    response_of,
    running_trainer,
)
from tests.faults.proxy import Fault, HttpFaultProxy
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import checkpoint_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import storage
from tinsmith_runtime.errors import ConfigError, StorageUnavailableError
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests, retries
from tinsmith_runtime.storage.s3 import client

ALWAYS_SNAPSHOT_S = 1e-9
LARGE = [make_datum(num_tokens=2500, seed=seed) for seed in range(2)]
"""A batch that is too large to be stored in the ledger itself."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_s3_server() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[HttpFaultProxy]:
    with HttpFaultProxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return tmp_path.name


@pytest.fixture
def direct(server: S3Server, prefix: str) -> ObjectStore:
    """The store of the trainer, reached without the proxy."""
    return storage.open(server.uri("bucket", prefix), environment=CREDENTIALS)


@pytest.fixture
def settings(
    server: S3Server, proxy: HttpFaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    # The first refusal is an outage, which is looked at again soon.
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(retries, "TRIAL_PAUSE_S", 0.05)
    uri = server.uri(
        "bucket", prefix, endpoint=proxy.endpoint, timeout_s=1.0, attempt_timeout_s=1.0
    )
    return {"storage_uri": uri}


@pytest.fixture
async def rig(
    tmp_path: Path, engine_host: EngineHost, settings: dict[str, Any]
) -> AsyncIterator[TrainerRig]:
    async with running_trainer(tmp_path / "data", engine_host, **settings) as rig:
        yield rig


async def waits_for_the_store(run: RunClient) -> bool:
    return "object store" in (await run.status()).waiting_for


async def accepted_later(run: RunClient, **call: Any) -> Any:
    """Send a request again, as a client does, until it is accepted."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                return await run.forward_backward(*LARGE, **call)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)


def bits_of(direct: ObjectStore, checkpoint: checkpoint_pb2.Checkpoint) -> dict[str, bytes]:
    """Return the tensor files of a checkpoint, verified."""
    folder = checkpoint_manifests.find_folder(
        direct, checkpoint.manifest_uri, sha256=checkpoint.manifest_sha256
    )
    _, files = checkpoint_manifests.read_checkpoint(direct, folder)
    return {name: data for name, data in files.items() if name.endswith(".safetensors")}


async def test_small_operations_go_on_and_large_ones_are_refused_before_the_acknowledgement(
    rig: TrainerRig, proxy: HttpFaultProxy, direct: ObjectStore
) -> None:
    plain = await rig.new_run("plain")
    await plain.step()
    await plain.step(*LARGE)
    wanted = bits_of(direct, await plain.saved("final"))
    run = await rig.new_run()
    with proxy.outage():
        assert await run.step() == 1
        request_id = new_id()
        for _ in range(2):
            error = await refusal(run.forward_backward(*LARGE, number=3, request_id=request_id))
            assert (code_of(error), error.reason) == ("UNAVAILABLE", "STORAGE_UNAVAILABLE")
            assert error.retry_after_s is not None
        assert (await run.status()).next_sequence_number == 3
        # Nothing is counted: a refused request takes no room in the queue.
        assert not rig.pod._registry._admission._all.num_operations
        # Others come and go meanwhile.
        other = await rig.new_run("other")
        assert await other.step() == 1
    await run.wait(await accepted_later(run, number=3, request_id=request_id))
    done = await run.wait(await run.optim_step(observed=3))
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 2
    assert bits_of(direct, await run.saved("final")) == wanted
    assert len(direct.list_folder(f"{run.name}/payloads")) == 1


async def test_a_save_waits_for_the_store_and_says_so(
    rig: TrainerRig, proxy: HttpFaultProxy, direct: ObjectStore
) -> None:
    run, other = await rig.new_run(), await rig.new_run("other")
    await run.step()
    wanted = bits_of(direct, await run.saved("before"))
    with proxy.outage():
        save = await run.save("a")
        await eventually(lambda: waits_for_the_store(run))
        assert not (await run.get(4)).done
        assert await other.step() == 1
    checkpoint = response_of(await run.wait(save), checkpoint_pb2.Checkpoint())
    assert bits_of(direct, checkpoint) == wanted
    assert not (await run.status()).waiting_for
    assert await run.step() == 2


async def test_a_load_waits_for_the_store(
    rig: TrainerRig, proxy: HttpFaultProxy, direct: ObjectStore
) -> None:
    run = await rig.new_run()
    await run.step()
    before = await run.saved("before")
    await run.step()
    with proxy.outage():
        load = await run.load(before.name)
        await eventually(lambda: waits_for_the_store(run))
    response_of(await run.wait(load), trainer_pb2.LoadCheckpointResponse())
    assert bits_of(direct, await run.saved("after")) == bits_of(direct, before)


async def test_snapshots_are_put_off(
    rig: TrainerRig, proxy: HttpFaultProxy, direct: ObjectStore
) -> None:
    await rig.restart(snapshot_replay_s=ALWAYS_SNAPSHOT_S)
    run = await rig.new_run()
    with proxy.outage():
        assert await run.step() == 1
        assert await run.step() == 2
    assert direct.list_folder(f"{run.name}/snapshots") == []

    async def has_snapshot() -> bool:
        await run.step()
        return bool(direct.list_folder(f"{run.name}/snapshots"))

    await eventually(has_snapshot)


async def test_a_stop_does_not_wait_for_the_store_and_loses_nothing(
    rig: TrainerRig, proxy: HttpFaultProxy, direct: ObjectStore
) -> None:
    run = await rig.new_run()
    await run.step()
    wanted = bits_of(direct, await run.saved("before"))
    with proxy.outage():
        await run.save("a")
        await eventually(lambda: waits_for_the_store(run))
        await rig.restart()
        # It started without the store, and waits for it again.
        await eventually(lambda: waits_for_the_store(run))
        other = await rig.new_run("other")
        assert await other.step() == 1
    checkpoint = response_of(await run.wait(4), checkpoint_pb2.Checkpoint())
    assert bits_of(direct, checkpoint) == wanted


async def test_a_run_whose_snapshot_is_in_the_store_waits_to_be_restored(
    rig: TrainerRig, proxy: HttpFaultProxy, direct: ObjectStore
) -> None:
    plain = await rig.new_run("plain")
    await plain.step()
    await plain.step()
    wanted = bits_of(direct, await plain.saved("final"))
    await rig.restart(max_parked_bytes=0, snapshot_replay_s=ALWAYS_SNAPSHOT_S)
    run = await rig.new_run()
    await run.step()
    await run.saved("quiet")  # the snapshot is written before it
    await rig.restart()
    with proxy.outage():
        await run.forward_backward()
        step = await run.optim_step()
        await eventually(lambda: waits_for_the_store(run))
    done = await run.wait(step)
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 2
    assert bits_of(direct, await run.saved("final")) == wanted


async def test_an_accepted_request_that_can_not_be_read_is_not_given_up(
    rig: TrainerRig, proxy: HttpFaultProxy
) -> None:
    run = await rig.new_run()
    with rig.engine_held():
        await run.forward_backward(*LARGE)
        left_behind = rig.copy_data()
    await run.wait(1)
    with proxy.outage():
        with pytest.raises(StorageUnavailableError):
            await rig.recover_from(left_behind)
        await rig.pod.stop()
    await rig.restart()
    assert logprobs_of(await run.wait(1))


async def test_what_a_deleted_run_left_goes_when_the_store_is_back(
    rig: TrainerRig, proxy: HttpFaultProxy, direct: ObjectStore
) -> None:
    run = await rig.new_run()
    await run.step(*LARGE)
    await run.saved("a")
    request = trainer_control_pb2.ReleaseRunRequest(
        run=run.name, epoch=1, mode=trainer_control_pb2.ReleaseRunRequest.MODE_DELETE
    )
    with proxy.outage():
        await rig.stub.ReleaseRun(request, metadata=pod("scheduler"), timeout=TIMEOUT_S)
    assert direct.list_folder(run.name)
    await rig.restart(checkpoint_sweep_interval_s=0.1)
    # The trainer sweeps in the background once it serves.
    await eventually(lambda: not direct.list_folder(run.name))


async def test_a_full_store_fails_the_save_and_nothing_else(
    rig: TrainerRig, proxy: HttpFaultProxy
) -> None:
    run = await rig.new_run()
    await run.step()
    with proxy.fault(Fault(status=507, code="", matches=lambda r: r.method == "PUT")):
        error = error_of(await run.wait(await run.save("a")))
    assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "STORAGE_FULL")
    assert await run.step() == 2
    assert (await run.saved("a")).version == 2


async def test_a_bucket_that_does_not_exist_keeps_the_trainer_from_starting(
    tmp_path: Path, engine_host: EngineHost, settings: dict[str, Any], server: S3Server
) -> None:
    rig = TrainerRig(
        tmp_path / "data", engine_host, storage_uri=server.uri("missing"), drain_timeout_s=0.05
    )
    await rig.scheduler.server.start()
    with pytest.raises(ConfigError, match="the bucket does not exist; create it"):
        await rig.start()
    await rig.pod.stop()
    await rig.scheduler.server.stop()
