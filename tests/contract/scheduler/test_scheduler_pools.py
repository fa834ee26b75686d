"""A caller whose key is bound to a pool reaches the workers of the pool, and only that caller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import (
    BASE_MODEL,
    Metadata,
    Rig,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.names import serving_pool
from tinsmith.v1 import scheduler_pb2, workers_pb2

Code = grpc.StatusCode
Worker = workers_pb2.Worker
JOB = "projects/default/trainingJobs/j"
POOL = "space.j"


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        yield rig


async def sampling_session(rig: Rig, who: Metadata, session: str, **source: str) -> str:
    request = scheduler_pb2.CreateSamplingSessionRequest(
        parent=session, request_id=new_id(), **source
    )
    answer = await rig.stub.CreateSamplingSession(request, metadata=who, timeout=60)
    return str(answer.sampler_addresses[0])


async def pool_of(rig: Rig, who: Metadata, session: str) -> str:
    request = scheduler_pb2.CreateSamplingSessionRequest(
        parent=session, request_id=new_id(), base_model=BASE_MODEL
    )
    answer = await rig.stub.CreateSamplingSession(request, metadata=who, timeout=60)
    return str(answer.pool)


async def capabilities(
    rig: Rig, who: Metadata, *, pool: str | None = None
) -> scheduler_pb2.Capabilities:
    request = scheduler_pb2.GetCapabilitiesRequest(parent="projects/default", pool=pool)
    answer: scheduler_pb2.Capabilities = await rig.stub.GetCapabilities(
        request, metadata=who, timeout=5
    )
    return answer


async def test_runs_and_samples_of_a_bound_key_stay_in_its_pool(rig: Rig) -> None:
    bound, user = await rig.job_key(JOB, pool=POOL), await rig.user()
    await rig.register(name="shared")
    await rig.register_sampler(name="shared-sampler", address="shared:1")
    session, users = await rig.session(bound), await rig.session(user)
    # Just after its start a scheduler does not know yet which workers come back.
    await rig.advance(20, keep=("shared", "shared-sampler"))
    with expect_rpc_error(Code.NOT_FOUND, reason="MODEL_NOT_FOUND") as found:
        await rig.begin_run(bound, session)
    assert "of pool space.j" in found[0].message
    with expect_rpc_error(Code.NOT_FOUND, reason="MODEL_NOT_FOUND"):
        await sampling_session(rig, bound, session, base_model=BASE_MODEL)
    assert not (await capabilities(rig, bound)).models

    await rig.register(name="own", pool=POOL)
    await rig.register(
        Worker.ROLE_SAMPLER, name="own-sampler", address="own:1", pool=POOL, max_runs=0
    )
    assert (await rig.create_run(bound, session)).worker == "workers/own"
    assert (await rig.create_run(user, users)).worker == "workers/shared"
    assert await sampling_session(rig, bound, session, base_model=BASE_MODEL) == "own:1"
    assert await sampling_session(rig, user, users, base_model=BASE_MODEL) == "shared:1"
    # Pods that act for a caller are told whose workers it may use.
    assert [await pool_of(rig, bound, session), await pool_of(rig, user, users)] == [POOL, ""]
    (model,) = (await capabilities(rig, bound)).models
    assert (model.trainable, model.sampleable, model.max_runs) == (True, True, 8)


async def test_a_run_moves_within_its_pool_at_once(rig: Rig) -> None:
    bound = await rig.job_key(JOB, pool=POOL)
    shared = {"incarnation": "1", "ledger": "ledger"}
    await rig.register(name="own", pool=POOL, **shared)
    await rig.register(name="other", **shared)
    run = await rig.create_run(bound, await rig.session(bound))
    await rig.register(name="own", pool=POOL, incarnation="2", ledger="ledger")

    async def is_back() -> bool:
        found = await rig.get_run(bound, run.name)
        return (
            found.state == scheduler_pb2.TrainingRun.STATE_ACTIVE and found.epoch == run.epoch + 1
        )

    await eventually(is_back)
    assert (await rig.get_run(bound, run.name)).worker == "workers/own"


async def test_a_restart_keeps_the_pool(rig: Rig) -> None:
    bound = await rig.job_key(JOB, pool=POOL)
    session = await rig.session(bound)
    await rig.restart()
    await rig.register(name="shared")
    await rig.register(name="own", pool=POOL)
    assert (await rig.create_run(bound, session)).worker == "workers/own"


async def test_a_pool_without_services_of_its_own_gets_the_shared_ones(rig: Rig) -> None:
    bound, user = await rig.job_key(JOB, pool=POOL), await rig.user()
    await rig.register(Worker.ROLE_ENVIRONMENT, name="e", address="e:1")
    await rig.register(Worker.ROLE_COORDINATOR, name="c", address="c:1")
    assert (await capabilities(rig, bound)).environment_address == "e:1"
    await rig.register(Worker.ROLE_ENVIRONMENT, name="own-e", address="own-e:1", pool=POOL)
    await rig.register(Worker.ROLE_COORDINATOR, name="own-c", address="own-c:1", pool=POOL)
    for who, environment, coordinator in ((bound, "own-e:1", "own-c:1"), (user, "e:1", "c:1")):
        found = await capabilities(rig, who)
        assert (found.environment_address, found.coordinator_address) == (environment, coordinator)


async def test_a_pod_asks_for_the_models_of_one_pool(rig: Rig) -> None:
    """A coordinator plays for samplers of all pools, and models of two may have one name."""
    coordinator, user = pod("coordinator"), await rig.user()
    await rig.register(name="own", pool=POOL)

    async def names(who: Metadata, pool: str | None = None) -> list[str]:
        found = await capabilities(rig, who, pool=pool)
        return [each.model.base_model for each in found.models]

    assert await names(coordinator) == await names(coordinator, POOL) == [BASE_MODEL]
    assert await names(coordinator, "") == []
    # A key of users has its own reach, whatever it asks for.
    assert await names(user, POOL) == []


async def test_a_dedicated_sampler_serves_its_checkpoint_alone(rig: Rig) -> None:
    user = await rig.user()
    await rig.register()
    session = await rig.session(user)
    checkpoint = f"{(await rig.create_run(user, session)).name}/checkpoints/c"
    rig.trainer.checkpoints[checkpoint] = BASE_MODEL
    dedicated = {"project": "default", "pool": serving_pool("default"), "max_runs": 0}
    dedicated["checkpoint"] = checkpoint
    await rig.register(Worker.ROLE_SAMPLER, name="serve", address="serve:1", **dedicated)
    (model,) = (await capabilities(rig, user)).models
    assert not model.sampleable
    assert await sampling_session(rig, user, session, checkpoint=checkpoint) == "serve:1"
    await rig.register_sampler(name="shared", address="shared:1")
    assert await sampling_session(rig, user, session, checkpoint=checkpoint) == "serve:1"
    assert await sampling_session(rig, user, session, base_model=BASE_MODEL) == "shared:1"


async def test_the_key_of_a_serving_sampler_registers_for_its_project_alone(rig: Rig) -> None:
    """A process that its model's files broke is not sent the prompts of others."""
    mine = pod("sampler", pool=serving_pool("default"))
    worker = Worker(name="workers/a", address="a:1", role=Worker.ROLE_SAMPLER)
    for pool, project in (("", ""), (serving_pool("other"), "other"), ("j.0a1b", "")):
        worker.pool, worker.project = pool, project
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="WORKER_FOREIGN"):
            await rig.worker_stub.RegisterWorker(
                workers_pb2.RegisterWorkerRequest(worker=worker), metadata=mine
            )
    worker.pool, worker.project = serving_pool("default"), "default"
    await rig.worker_stub.RegisterWorker(
        workers_pb2.RegisterWorkerRequest(worker=worker), metadata=mine
    )


async def test_checkpoints_outlive_the_pool_that_made_them(rig: Rig) -> None:
    bound, user = await rig.job_key(JOB, pool=POOL), await rig.user()
    await rig.register(name="own", pool=POOL, incarnation="1", ledger="ledger", address="gone:1")
    await rig.register(name="own", pool=POOL, incarnation="1", ledger="ledger")
    run = await rig.create_run(bound, await rig.session(bound))
    checkpoint = f"{run.name}/checkpoints/final"
    rig.trainer.checkpoints[checkpoint] = BASE_MODEL
    request = workers_pb2.DeregisterWorkerRequest(name="workers/own", incarnation="1")
    await rig.worker_stub.DeregisterWorker(request, metadata=pod("trainer", pool=POOL))
    locate = scheduler_pb2.LocateCheckpointRequest(checkpoint=checkpoint)
    get = scheduler_pb2.GetTrainingRunRequest(name=run.name)
    # That of another pool is not for all.
    await rig.register(name="foreign", incarnation="3", ledger="ledger", pool="other.pool")
    with expect_rpc_error(Code.UNAVAILABLE, reason="WORKER_UNAVAILABLE"):
        await rig.stub.LocateCheckpoint(locate, metadata=user)
    assert not (await rig.stub.GetTrainingRun(get, metadata=user)).checkpoint_address
    await rig.register(name="shared", incarnation="7", ledger="ledger")
    found = await rig.stub.LocateCheckpoint(locate, metadata=user)
    assert found.trainer_address == rig.trainer.server.address
    left = await rig.stub.GetTrainingRun(get, metadata=user)
    assert (left.trainer_address, left.checkpoint_address) == ("", found.trainer_address)


@pytest.mark.parametrize(
    "worker",
    [
        Worker(role=Worker.ROLE_SAMPLER, pool="p", project="default"),
        Worker(role=Worker.ROLE_TRAINER, max_runs=1, project="default"),
        Worker(role=Worker.ROLE_SAMPLER, checkpoint="projects/p/trainingRuns/r/checkpoints/c"),
        Worker(
            role=Worker.ROLE_SAMPLER,
            pool=serving_pool("default"),
            project="default",
            checkpoint="c",
        ),
        Worker(role=Worker.ROLE_SAMPLER, project="default"),
        Worker(role=Worker.ROLE_SAMPLER, pool=serving_pool("other"), project="default"),
    ],
    ids=[
        "pool-and-project",
        "dedicated-trainer",
        "no-project",
        "bad-checkpoint",
        "shared-pool",
        "pool-of-another-project",
    ],
)
async def test_workers_that_are_neither_pooled_nor_dedicated(
    rig: Rig, worker: workers_pb2.Worker
) -> None:
    worker.name, worker.address = "workers/a", "a:1"
    request = workers_pb2.RegisterWorkerRequest(worker=worker)
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.worker_stub.RegisterWorker(request, metadata=pod("trainer"))
