"""Coordinators of a pool and the shared one, beside each other on one PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fakes.scheduler import FakeScheduler
from tests.support.pod_keys import POD_KEY

from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.pod import CoordinatorPod


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler()
    await scheduler.server.start()
    yield scheduler
    await scheduler.server.stop()


async def test_each_pool_has_a_coordinator_of_its_own(
    tmp_path: Path, postgres_url: str, scheduler: FakeScheduler
) -> None:
    pods = [
        CoordinatorPod(
            CoordinatorConfig(
                data_dir=tmp_path / name,
                database_url=postgres_url,
                scheduler_address=scheduler.server.address,
                pod_key=POD_KEY,
                worker_name=name,
                pool=pool,
                drain_timeout_s=0.2,
            )
        )
        for name, pool in (("shared", ""), ("first", "match.1"), ("second", "match.2"))
    ]
    try:
        for pod in pods:
            # One that had to wait for another one's lock would not get listed.
            await pod.start()
            await pod.wait_listed(30)
    finally:
        for pod in pods:
            await pod.stop()
    found = {worker.name: worker.pool for worker in scheduler.workers.values()}
    assert found == {
        "workers/shared": "",
        "workers/first": "match.1",
        "workers/second": "match.2",
    }
