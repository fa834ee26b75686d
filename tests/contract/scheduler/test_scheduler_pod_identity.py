"""What the scheduler lets a pod do with the key of its role and pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import Rig, expect_rpc_error, running_rig
from tests.support.pod_keys import POD_KEY, Metadata, pod

from tinsmith.v1 import keys_pb2, workers_pb2
from tinsmith_runtime.rpc.key_checks import check_secret
from tinsmith_runtime.rpc.pod_identity import PodIdentity, PodKey, PodRole

Code = grpc.StatusCode
Worker = workers_pb2.Worker


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path) as rig:
        yield rig


def registration(name: str = "w", pool: str = "") -> workers_pb2.RegisterWorkerRequest:
    worker = Worker(
        name=f"workers/{name}", role=Worker.ROLE_TRAINER, address="a:1", max_runs=1, pool=pool
    )
    return workers_pb2.RegisterWorkerRequest(worker=worker)


@pytest.mark.parametrize(
    ("who", "pool"),
    [
        pytest.param(pod("environment"), "", id="role"),
        pytest.param(pod("trainer", pool="mine.1"), "", id="shared-pool"),
        pytest.param(pod("trainer", pool="mine.1"), "theirs.2", id="pool"),
        pytest.param(pod("trainer"), "theirs.2", id="from-the-shared-pool"),
    ],
)
async def test_a_pod_registers_as_what_its_key_says(rig: Rig, who: Metadata, pool: str) -> None:
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="WORKER_FOREIGN"):
        await rig.worker_stub.RegisterWorker(registration(pool=pool), metadata=who, timeout=60)
    await rig.worker_stub.RegisterWorker(
        registration(pool=pool), metadata=pod("trainer", pool=pool), timeout=5
    )


async def test_the_name_of_another_worker_is_not_taken(rig: Rig) -> None:
    mine = pod("trainer", pool="mine.1")
    await rig.worker_stub.RegisterWorker(registration(), metadata=pod("trainer"), timeout=60)
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="WORKER_FOREIGN"):
        await rig.worker_stub.RegisterWorker(registration(pool="mine.1"), metadata=mine, timeout=60)
    for method, request in (
        (rig.worker_stub.HeartbeatWorker, workers_pb2.HeartbeatWorkerRequest(name="workers/w")),
        (rig.worker_stub.DeregisterWorker, workers_pb2.DeregisterWorkerRequest(name="workers/w")),
    ):
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="WORKER_FOREIGN"):
            await method(request, metadata=mine, timeout=60)
        await method(request, metadata=pod("trainer"), timeout=60)


@pytest.mark.parametrize("role", ["trainer", "sampler", "environment", "coordinator"])
async def test_the_key_of_a_worker_makes_no_key_of_users(rig: Rig, role: str) -> None:
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await rig.job_key("projects/default/trainingJobs/j", who=pod(role))


async def test_the_scheduler_says_what_a_pod_is(rig: Rig) -> None:
    key = PodKey.derive(POD_KEY, PodIdentity(PodRole.SAMPLER, "jobs", "p.1"))
    request = keys_pb2.VerifyKeyRequest(key_id=key.identity.key_id, secret_sha256=key.secret_sha256)
    answer = await rig.key_stub.VerifyKey(request, metadata=pod("trainer"), timeout=60)
    assert (answer.role, answer.pool, answer.is_pod) == ("sampler", "p.1", True)
    assert answer.check_secrets == [check_secret(POD_KEY)]
    request.secret_sha256 = bytes(32)
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_INVALID"):
        await rig.key_stub.VerifyKey(request, metadata=pod("trainer"), timeout=60)
