"""What the key of a job's driver is not for, and how long audit events are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import Rig, expect_rpc_error, new_id, running_rig

from tinsmith.v1 import job_pb2, scheduler_pb2

Code = grpc.StatusCode


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, reap_interval_s=0.01) as rig:
        yield rig


async def test_a_driver_makes_no_jobs(rig: Rig) -> None:
    driver = await rig.job_key("projects/default/trainingJobs/j")
    request = job_pb2.CreateTrainingJobRequest(parent="projects/default", request_id=new_id())
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await rig.jobs.CreateTrainingJob(request, metadata=driver, timeout=60)


async def test_audit_events_are_dropped_after_their_retention(rig: Rig) -> None:
    await rig.user()
    request = scheduler_pb2.ListAuditEventsRequest(parent="projects/default")
    assert (await rig.stub.ListAuditEvents(request, metadata=rig.admin)).events
    # The events are forgotten at once by a scheduler that starts.
    rig.settings["audit_retention_s"] = 0.001
    await rig.restart()
    while (await rig.stub.ListAuditEvents(request, metadata=rig.admin)).events:
        await asyncio.sleep(0.01)
